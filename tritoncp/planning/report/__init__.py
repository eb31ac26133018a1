"""Plans for readers: text, JSON and pictures, and the command `tritoncp plan`."""
