"""Which layers TensorRT made of a graph, read from its verbose log: without a GPU there is no other inspector."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Layer", "layers_of", "missing_plugins", "report_text"]

_LINE = re.compile(r"^(?:Name|Layer): (?P<name>.*?), LayerType: (?P<kind>[^,]+),(?P<rest>.*)$")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_TACTIC = re.compile(r"TacticName: ([^,]*),")
_ORIGIN = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_FUSED = r"(?:_U\d+)?(?:_myl\d+_\d+)?"  # what a fused region adds to a node's name
_PLUGIN_KINDS = ("PluginV3", "custom_layer")  # by itself, or among the layers of a fused region


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an engine."""

    name: str
    kind: str
    profile: int
    tactic: str
    origins: tuple[str, ...]  # nodes of the graph


def layers_of(messages: Iterable[str]) -> list[Layer]:
    """Return the layers that the messages of a build list, in order; `messages` may have many lines each."""
    found: list[Layer] = []
    profile = 0
    for line in (line for message in messages for line in message.split("\n")):
        match = _LINE.match(line)
        if match is None:
            continue
        numbers = [int(number) for number in _PROFILE.findall(line)]
        # Inside a fused region names have no profile: regions come profile after profile.
        profile = max([profile, *numbers])
        tactic = _TACTIC.search(match["rest"])
        found.append(
            Layer(
                name=_PROFILE.sub("", match["name"]),
                kind=match["kind"],
                profile=profile,
                tactic=tactic[1] if tactic else "",
                origins=tuple(dict.fromkeys(_ORIGIN.findall(match["rest"]))),
            )
        )
    return found


def missing_plugins(layers: Sequence[Layer], nodes: Sequence[str], *, num_profiles: int) -> list[str]:
    """Return the plugin nodes that are not a plugin's layer in some profile.

    Arguments:
        nodes: names of the graph's nodes of our domain.
    """
    plugins = [(layer.name, layer.profile) for layer in layers if layer.kind in _PLUGIN_KINDS]

    def is_there(node: str, profile: int) -> bool:
        name = re.compile(re.escape(node) + _FUSED)
        return any(at == profile and name.fullmatch(found) for found, at in plugins)

    return [node for node in nodes if not all(is_there(node, profile) for profile in range(num_profiles))]


def report_text(title: str, layers: Sequence[Layer], profiles: Sequence[str]) -> str:
    """Return a page: how many layers of each kind, then every layer with what it was made of."""
    lines = [f"# {title}", ""]
    for index, name in enumerate(profiles):
        its = [layer for layer in layers if layer.profile == index]
        counts = Counter(layer.kind for layer in its)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        lines += [f"## Profile {index}: {name}", "", told, "", "| kind | layer | tactic | made of |"]
        lines += ["| --- | --- | --- | --- |"]
        lines += [
            f"| {layer.kind} | `{layer.name}` | {layer.tactic} | {' '.join(layer.origins)} |" for layer in its
        ]
        lines.append("")
    return "\n".join(lines)
