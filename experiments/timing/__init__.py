"""How long things take on the devices at hand."""
