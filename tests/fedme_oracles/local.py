"""Local: every client trains its own model on its own samples, and nothing travels.

The trivial method that others are compared with.

Choices:
1. A client trains only in the rounds in which it takes part.
"""

from dataclasses import dataclass

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, train


@dataclass(frozen=True)
class Settings:
    sgd: Sgd = Sgd()


def run(problem: Problem, settings: Settings = Settings(), phase: str = "train") -> list[After]:
    models = [copy_of(state) for state in problem.first]
    history = []
    for t, participants in enumerate(problem.participants):
        for i in participants:
            models[i] = train(load(problem.networks[i], models[i]), problem.batches(t, i, phase), settings.sgd)
        history.append(After(None, [copy_of(m) for m in models], {i: copy_of(models[i]) for i in participants}))
    return history
