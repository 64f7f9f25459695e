"""What a machine gets that installs only the client: no torch, nothing of the engine, little beside numpy and gRPC."""

from importlib import metadata

from packaging.requirements import Requirement

# Everything there may be, and why: arrays, tritonclient and what its gRPC part needs.
ALLOWED = {
    "numpy",
    "tritonclient",
    "grpcio",
    "packaging",
    "protobuf",
    "python-rapidjson",
    "typing-extensions",
    "urllib3",
}


def needed(name, extras=frozenset(), seen=None):
    """Return the names of a package and all that it needs, as installed here."""
    seen = {} if seen is None else seen
    key = name.lower().replace("_", "-")
    if key in seen and extras <= seen[key]:
        return seen
    seen[key] = seen.get(key, frozenset()) | extras
    for text in metadata.requires(name) or ():
        wanted = Requirement(text)
        marker = wanted.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            needed(wanted.name, frozenset(wanted.extras), seen)
    return seen


def installed_bytes(name):
    return sum(
        path.stat().st_size
        for file in metadata.files(name) or ()
        if (path := file.locate()).is_file() and path.suffix != ".pyc" and path.name != "perf_analyzer"
    )


def test_the_client_extra_needs_little():
    names = set(needed("dspark-triton", frozenset({"client"}))) - {"dspark-triton"}
    assert {"numpy", "tritonclient", "grpcio", "protobuf"} <= names
    assert names <= ALLOWED
    beside_numpy = sum(installed_bytes(name) for name in names - {"numpy"})
    # All of it is 41 MB to fetch; on the disk numpy takes 79 MB more, and perf_analyzer, which tritonclient brings, 38.
    assert 10e6 < beside_numpy < 60e6, {name: installed_bytes(name) for name in names}
