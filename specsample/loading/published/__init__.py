"""Drafters in the layouts in which others publish them.

`layouts.load` finds the layout of a folder.
"""
