"""Real federations: the files of the operator and the sites, their messages, and the Flower commands that run them."""
