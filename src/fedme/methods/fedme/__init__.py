"""FedMe, in four files: the method, clustering, the exchange of models, and adoption."""

from fedme.methods.fedme.fedme import FedMe

__all__ = ["FedMe"]
