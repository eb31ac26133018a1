"""PTX: its text as blocks of instructions, and the Python source written for them."""
