"""Classification of blocks as absent, full or masked: a mask_mod is bounded over tiles, then evaluated at
pairs."""
