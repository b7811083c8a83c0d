"""The images: which base each has, by digest, what a built one is called, and building it.

`docker/images.toml` is the table. A built image is called after the hash of everything that goes into it (the files of
docker/ and the base), so that one name never means two things, a run needs no registry to know which image it wants,
and nothing is built twice.

The engine's classic builder is used, through the SDK: it is on every engine, where BuildKit is a plugin that Debian's
package lacks.

Not here: running anything in an image (container.py).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from harness import engine
from harness.errors import ConfigError, HarnessError, InfraError, PullError, UsageError

FOLDER = "docker"
TABLE = "images.toml"
UNPINNED = "unpinned"
INPUTS = "fp8ci.inputs"
BASE = "fp8ci.base"

#: What an engine says when a registry does not give a base.
NOT_HAD = ("pull access denied", "manifest unknown", "not found", "dial tcp", "TLS handshake", "Client.Timeout")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image. `tag` is for people, and for the command that pins; `torch` begins the version that it must have."""

    base: str
    tag: str
    digest: str
    torch: str
    triton: str | None = None

    @property
    def pinned(self) -> bool:
        return self.digest != UNPINNED

    @property
    def reference(self) -> str:
        """What the engine takes: by digest, or by tag where there is none yet."""
        return f"{self.base}@{self.digest}" if self.pinned else f"{self.base}:{self.tag}"


@dataclass(frozen=True)
class Image:
    """One image of a checkout: its row, the base that is really taken, and the name of what is built from it."""

    name: str
    row: Row
    base: str
    tag: str


def load(root: Path) -> Mapping[str, Row]:
    """The table of a checkout; ConfigError for what it may not hold."""
    path = root / FOLDER / TABLE
    try:
        rows = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Row])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})", "the table of images", "restore it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}", "base, tag, digest, torch (and triton) a row", "correct it") from error
    for name, row in rows.items():
        if row.pinned and not re.fullmatch(r"sha256:[0-9a-f]{64}", row.digest):
            raise ConfigError(
                f"{path}: {name} has digest {row.digest!r}", f"sha256: and 64 hex digits, or {UNPINNED}", "pin it"
            )
        if not (root / FOLDER / f"{name}.Dockerfile").is_file():
            raise ConfigError(f"{path}: {name} has no {name}.Dockerfile", "one beside the table", "add it")
    return rows


def get(root: Path, name: str, base: str | None = None) -> Image:
    """An image by name; `base` in place of the table's own. UsageError for an unknown name."""
    rows = load(root)
    if name not in rows:
        raise UsageError(f"there is no image {name!r}", f"one of {', '.join(rows)}", "see docker/images.toml")
    taken = base or rows[name].reference
    return Image(name, rows[name], taken, f"fp8ci-{name}:{inputs(root, taken)[:16]}")


def inputs(root: Path, base: str) -> str:
    """The hash of what an image is made of: the base's name, and names and bytes of the files of docker/."""
    digest = hashlib.sha256(base.encode())
    for path in _files(root):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _files(root: Path) -> list[Path]:
    # README and the like change no image; the table's other rows would, for no reason, but its comments say why.
    return [path for path in sorted((root / FOLDER).iterdir()) if path.is_file() and path.suffix != ".md"]


def how_to_pin(name: str, row: Row) -> str:
    """The command whose output is the missing digest."""
    reference = f"{row.base}:{row.tag}"
    return f"docker pull {reference} && docker image inspect --format '{{{{index .RepoDigests 0}}}}' {reference}"


def build(
    client: Any,
    root: Path,
    image: Image,
    *,
    wheels: Path | None = None,
    certificates: Path | None = None,
    in_ci: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Build an image unless the engine has it already; whether it was built.

    `wheels`: a folder of wheels to install from, instead of an index. `certificates`: a CA bundle that pip must trust.
    ConfigError for a base without a digest in CI. PullError when the base cannot be had, InfraError when it fails.
    """
    if in_ci and not image.row.pinned and image.base == image.row.reference:
        raise ConfigError(
            f"{FOLDER}/{TABLE}: the base of {image.name} is {UNPINNED}",
            "a digest, so that today's image can be had tomorrow",
            f"pin it with what this prints: {how_to_pin(image.name, image.row)}",
        )
    if exists(client, image.tag):
        return False
    arguments = {"BASE": image.base, "TORCH": image.row.torch}
    with tempfile.TemporaryFile() as context:
        _lay_out(context, root, wheels, certificates)
        context.seek(0)
        try:
            answer = client.api.build(
                fileobj=context,
                custom_context=True,
                dockerfile=f"{image.name}.Dockerfile",
                tag=image.tag,
                buildargs=arguments,
                labels={INPUTS: inputs(root, image.base), BASE: image.base},
                network_mode="none" if wheels else None,
                rm=True,
                forcerm=True,
                decode=True,
                timeout=None,
            )
            last = ""
            for message in answer:
                if "error" in message:
                    raise _failed(image, str(message["error"]), last)
                text = str(message.get("stream") or message.get("status") or "").rstrip()
                if text:
                    say(text)
                    last = text
        except HarnessError:
            raise
        except Exception as error:
            raise engine.failure(error, f"{image.tag} cannot be built") from error
    return True


def exists(client: Any, tag: str) -> bool:
    """Whether the engine has an image."""
    return describe(client, tag) is not None


def describe(client: Any, tag: str) -> Mapping[str, Any] | None:
    """What the engine says of an image, None where it has none."""
    from docker.errors import ImageNotFound

    try:
        told: Mapping[str, Any] = client.api.inspect_image(tag)
    except ImageNotFound:
        return None
    except Exception as error:
        raise engine.failure(error, f"image {tag} cannot be looked at") from error
    return told


#: How an engine names the architecture of an image, and a kernel that of a machine.
ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}


def require(client: Any, tag: str, machine: str, name: str) -> str:
    """The id of an image that a run is about to use; PullError or InfraError where it cannot run here."""
    told = describe(client, tag)
    if told is None:
        raise PullError(
            f"the engine has no image {tag}", "the image of this checkout", f"`fp8ci image build {name}` makes it"
        )
    built_for = str(told.get("Architecture", ""))
    if built_for != ARCHITECTURES.get(machine, machine):
        raise InfraError(f"image {tag} is for {built_for} and the engine is {machine}", "one for it", "build it there")
    return str(told["Id"])


def _failed(image: Image, what: str, last: str) -> HarnessError:
    text = " ".join(what.split())
    if any(word in text for word in NOT_HAD):
        what = f"base {image.base} cannot be had: {text}"
        return PullError(what, "a registry that answers", "pull it by hand, or name another with --base")
    return InfraError(f"{image.tag} cannot be built: {text} (last: {last})", "a build that ends well", "see its output")


def _lay_out(context: IO[bytes], root: Path, wheels: Path | None, certificates: Path | None) -> None:
    """The build context: the files of docker/, and wheels/ and ca/, which exist even where they are empty."""
    with tarfile.open(fileobj=context, mode="w") as tar:
        for path in _files(root):
            tar.add(path, arcname=path.name, filter=_anonymous)
        for folder in ("wheels", "ca"):
            tar.addfile(_anonymous(_entry(f"{folder}/.keep")), io.BytesIO())
        for path in sorted(wheels.glob("*.whl")) if wheels else ():
            tar.add(path, arcname=f"wheels/{path.name}", filter=_anonymous)
        if certificates is not None:
            tar.add(os.path.realpath(certificates), arcname="ca/extra.crt", filter=_anonymous)


def _entry(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    return entry


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whoever builds, and whenever: the same context, so that the engine's cache knows it."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode |= 0o444
    return entry
