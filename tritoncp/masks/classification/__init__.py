"""Classification of blocks as empty, full or masked: by bounds of a mask_mod over tiles, then by pairs."""
