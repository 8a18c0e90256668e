"""The state of replicas and models, for the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.ops.collectors import ModelSample, ReplicaSample
from gateway.pool.replica import Replica, ServedModel


def replica_samples(replicas: Iterable[Replica], served: Iterable[ServedModel]) -> Iterator[ReplicaSample]:
    """Yield the state of each replica."""
    names = {replica: model.name for model in served for replica in model.replicas}
    for replica in replicas:
        yield ReplicaSample(replica.client.url, names.get(replica, ""), replica.state, replica.in_flight, replica.tokens)


def model_samples(served: Iterable[ServedModel]) -> Iterator[ModelSample]:
    """Yield the state of each model, all its versions together."""
    versions_of: dict[str, list[ServedModel]] = {}
    for model in served:
        versions_of.setdefault(model.name, []).append(model)
    for name, versions in sorted(versions_of.items()):
        adapters = {adapter.adapter.name for model in versions for adapter in model.adapters.values() if adapter.replicas}
        ready, waiting = sum(len(model.ready) for model in versions), sum(model.waiting for model in versions)
        yield ModelSample(name, ready, waiting, len(adapters))
