"""What a plan costs: keys and bytes that move, the layer and its hardware, and times of schedules."""
