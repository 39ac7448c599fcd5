"""Real federations: what the operator and the sites have on disk, what they say to each other, and Flower's commands for it."""
