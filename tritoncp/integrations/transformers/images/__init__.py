"""Images, videos and audio of a sharded batch: who embeds them, where their rows go, and their positions."""
