"""Mask_mods, score_mods and masks in compiled graphs: structure as constants, captures as graph inputs."""
