"""Every built-in method as a learner: ``fedme.FedMe(rounds=30).fit(clients)``. Signatures: `methods.pyi`."""

from fedme.api.learner import learner
from fedme.methods import BUILT_IN

globals().update({method.__name__: learner(method) for method in BUILT_IN})
