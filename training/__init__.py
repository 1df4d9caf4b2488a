"""Training of what the repository ships as weights. Not part of the node pack."""
