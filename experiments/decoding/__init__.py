"""How a method decodes prompts, and how that is shown."""
