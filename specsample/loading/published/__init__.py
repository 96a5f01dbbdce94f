"""Drafters in the layouts that others publish them in.

`layouts.load` finds out which one a folder is of.
"""
