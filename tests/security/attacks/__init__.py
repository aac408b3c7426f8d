"""One module for each area of attacks; its name is the area."""
