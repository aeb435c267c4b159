"""Which layers share a block table. Sharing layers follow the layer whose KV they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvloom.errors import ConfigError, ModelError, UnsupportedModelError
from kvloom.kv.policy import POLICIES
from kvloom.kv.spec import KVCacheGroupSpec, KVCacheSpec


def merge_layers(kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """All workers' layers by name, in order.

    Raises:
        ConfigError: two workers store the same layer differently.
        ModelError: a worker has no layers, or a layer shares the KV of none that stores any.
    """
    layers: dict[str, KVCacheSpec] = {}
    for worker, specs in enumerate(kv_cache_specs):
        if not specs:
            raise ModelError(
                f"worker {worker} has no attention layers, so there is no KV to cache; "
                "choose a model with attention, or fewer workers"
            )
        for name, spec in specs.items():
            if layers.setdefault(name, spec) != spec:
                raise ConfigError(
                    f"layer {name} is {layers[name]} on an earlier worker, but {spec} on worker "
                    f"{worker}; give all workers the same model and options"
                )
            _check_target(name, spec, specs)
    return layers


def _check_target(name: str, spec: KVCacheSpec, specs: Mapping[str, KVCacheSpec]) -> None:
    """A layer without KV of its own reads that of an earlier layer on the same worker."""
    if spec.shared_target is None:
        return
    names = list(specs)
    earlier = names[: names.index(name)]
    if spec.shared_target not in earlier or specs[spec.shared_target].shared_target is not None:
        raise ModelError(
            f"layer {name} shares the KV of {spec.shared_target}, which is no earlier layer with "
            "KV of its own on the same worker; correct the model's shares_kv_with"
        )


def group_layers(layers: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Which layers share a block table: all of them, as long as they are alike.

    Raises:
        UnsupportedModelError: layers of a kind without a policy, or layers that differ.
    """
    storing = {name: spec for name, spec in layers.items() if spec.shared_target is None}
    for name, spec in storing.items():
        if type(spec) not in POLICIES:
            raise UnsupportedModelError(
                f"layer {name} needs {type(spec).__name__}, which the cache does not manage yet; "
                f"choose a model that needs {', '.join(sorted(s.__name__ for s in POLICIES))} only"
            )
    (first, common), *others = storing.items()
    for name, spec in others:
        if spec != common:
            raise UnsupportedModelError(
                f"layer {name} stores {spec}, but {first} stores {common}; layers that differ are "
                "not planned yet: choose a model whose layers are alike"
            )
    return [KVCacheGroupSpec(list(layers), common)]


def groups_of_worker(
    specs: Mapping[str, KVCacheSpec], groups: list[KVCacheGroupSpec]
) -> list[KVCacheGroupSpec]:
    """The same groups, with the layers of one worker."""
    return [
        KVCacheGroupSpec([n for n in g.layer_names if n in specs], g.kv_cache_spec) for g in groups
    ]
