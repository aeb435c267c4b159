"""Which layers share a block table. Sharing layers follow the layer whose KV they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvloom.errors import ConfigError, ModelError, UnsupportedModelError
from kvloom.kv.layout import GroupShape, deal
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


def layer_types(layers: Mapping[str, KVCacheSpec]) -> dict[KVCacheSpec, list[str]]:
    """The layers that store KV, in order, by how they store it.

    Raises:
        UnsupportedModelError: layers of a kind without a policy.
    """
    types: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        if spec.shared_target is not None:
            continue
        if type(spec) not in POLICIES:
            raise UnsupportedModelError(
                f"layer {name} needs {type(spec).__name__}, which the cache does not manage yet; "
                f"choose a model that needs {', '.join(sorted(s.__name__ for s in POLICIES))} only"
            )
        types.setdefault(spec, []).append(name)
    return types


def deal_layers(
    types: Mapping[KVCacheSpec, Sequence[str]], shapes: Sequence[GroupShape]
) -> list[KVCacheGroupSpec]:
    """Groups of these shapes, in order of their first layer; runs of a type's layers are spread."""
    groups: list[KVCacheGroupSpec] = []
    for spec, names in types.items():
        of_type = [shape for shape in shapes if shape.layer_type.spec == spec]
        members: list[list[str]] = [[] for _ in of_type]
        for name, index in zip(
            names, deal(len(names), [s.num_layers for s in of_type]), strict=True
        ):
            members[index].append(name)
        groups += map(KVCacheGroupSpec, members, [shape.spec for shape in of_type])
    order = {name: i for i, name in enumerate(n for names in types.values() for n in names)}
    return sorted(groups, key=lambda group: order[group.layer_names[0]])


def add_sharing_layers(
    groups: Sequence[KVCacheGroupSpec], layers: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The same groups, with the layers that read the KV of their members, in order of `layers`."""
    return [
        KVCacheGroupSpec(
            [name for name, spec in layers.items() if (spec.shared_target or name) in members],
            group.kv_cache_spec,
        )
        for group in groups
        for members in [set(group.layer_names)]
    ]


def groups_of_worker(
    specs: Mapping[str, KVCacheSpec], groups: list[KVCacheGroupSpec]
) -> list[KVCacheGroupSpec]:
    """The same groups, with the layers of one worker."""
    return [
        KVCacheGroupSpec([n for n in g.layer_names if n in specs], g.kv_cache_spec) for g in groups
    ]
