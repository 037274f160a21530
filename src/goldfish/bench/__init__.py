"""What ``goldfish bench`` measures: speed and memory, as ratios taken in one run."""
