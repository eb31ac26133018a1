"""PTX: parser to basic blocks of instructions, and translation of these to Python source."""
