"""PTX: a parser that makes basic blocks of instructions, and their translation to Python source."""
