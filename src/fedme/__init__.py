"""FedMe: personalised federated learning where every client keeps its own model, of its own architecture."""

__version__ = "0.1.0"
