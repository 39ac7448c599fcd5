"""The methods by their names: ``FedMe(rounds=30).fit(clients)``."""

from fedme.api.learner import Learner


class FedMe(Learner):
    """Clients of any architecture exchange models, learn mutually and keep the better model."""

    method = "fedme"


class FML(Learner):
    """A shared and a private model, of any architecture, learn from each other; only the shared one travels."""

    method = "fml"


class PFML(Learner):
    """Regularised mutual learning of a shared local model and a private auxiliary one."""

    method = "pfml"


class Local(Learner):
    """Every client trains its own model on its own data."""

    method = "local"


class Centralized(Learner):
    """One model trained on everybody's pooled data."""

    method = "centralized"


class FedAvg(Learner):
    """Clients train copies of one model, the server averages them."""

    method = "fedavg"


class FedProx(Learner):
    """FedAvg whose clients are pulled back to the model they received."""

    method = "fedprox"


class HypCluster(Learner):
    """Several global models; each client trains the one that fits it best."""

    method = "hypcluster"


class Mapper(Learner):
    """Every client mixes a local and a global model in its own proportion."""

    method = "mapper"


class FedMD(Learner):
    """Clients of any architecture agree on their outputs for public data."""

    method = "fedmd"


class PFedMe(Learner):
    """Personal models tied to a global one by Moreau envelopes."""

    method = "pfedme"
