"""`howsmooth certify`: proved bounds at an input, around it, and proved radii of a classifier of images."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from howsmooth import __version__
from howsmooth._util.common import distinct_files, file_digest
from howsmooth._util.ledger import Ledger
from howsmooth._util.validation import check_device
from howsmooth.certificates import Certificate, PatchTransformer
from howsmooth.certificates.ball.block_ball import expected_change_seconds
from howsmooth.certificates.ball.on_ball import ladder, ladder_radii
from howsmooth.certificates.certify_any import certify_patches, certify_tokens
from howsmooth.certificates.point.enclosure import expected_block_seconds, expected_seconds
from howsmooth.cli.networks import certify_source
from howsmooth.cli.options import AsJson, Report, Resume, command, exact_option, out_option, what_option, where_option
from howsmooth.cli.source_options import MapAtTokens, MapOptions, kinds_of_map
from howsmooth.cli.terminal import print_json, show, stderr, step_progress, written
from howsmooth.errors import InvalidInput
from howsmooth.models.network_source import names_network
from howsmooth.models.weight_files import read_tensors
from howsmooth.reports.sections import check_section_path, write_certificates
from howsmooth.search.attacks import minimal_norm_attack
from howsmooth.sets import Around, SetText

_NORMS: dict[str, float] = {"2": 2, "1": 1, "inf": torch.inf}
_LONG = 10.0
"""Seconds of work that are announced before they start."""


@command
def certify(
    options: MapOptions,
    what: Annotated[str, what_option("attention (the block), head or both.")] = "attention,head",
    over: Annotated[str, where_option("The set: point, around:0.01, around:1% or together:0.01.")] = "point",
    images: Annotated[
        Path | None,
        what_option("File with tensors images (bytes, or numbers from 0 to 1) and labels: SOURCE is a classifier."),
    ] = None,
    label: Annotated[
        int | None,
        what_option("Class that a network must not leave (the one it gives): SOURCE is a classifier.", min=0),
    ] = None,
    moving: Annotated[
        str | None, where_option("Tokens of a classified input that move, for example 3 or 0,2-4 (all).", "--tokens")
    ] = None,
    count: Annotated[int | None, what_option("Only the first images of the file.", min=1)] = None,
    norm: Annotated[Literal["2", "1", "inf"], what_option("Norm of the distance between images.", "--distance")] = "2",
    attack: Annotated[bool, exact_option("Search for a nearer image (norm 2).")] = True,
    out: Annotated[Path | None, out_option("Ledger of finished images (none).")] = None,
    resume: Resume = True,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Prove how far the output of attention can move, or within which distance an image keeps its class.

    Upper bounds and radii hold in exact arithmetic, rounding included, and so do lower bounds but for large maps, where
    they are measured and marked so. The page of --report shows measured ≤ worst found ≤ certified, every head against
    the radius (to 1 % of the token norm, or to the distance of --over).

    Examples:
      howsmooth certify random --width 16 --heads 2 --length 8 --what head
      howsmooth certify minilm --layer 2 --length 32 --what head --over around:0.01
      howsmooth certify minilm --layer 2 --length 16 --what head --report report.html
      howsmooth certify net.onnx --input x.npy
      howsmooth certify my.models:make_net --input tokens.npy --label 1 --tokens 3
      howsmooth certify deept_mnist_vit.safetensors --images mnist.safetensors --distance 2 --json
      howsmooth certify deept_mnist_vit.safetensors --images mnist.safetensors --distance inf --out radii.sqlite
    """
    if report is not None:
        if images is not None:
            raise InvalidInput("--report is about the heads of an attention map: leave out --images.")
        check_section_path(report)
    if images is None and (label is not None or moving is not None or names_network(options.source)):
        if report is not None or count is not None or out is not None or over != "point" or what != "attention,head":
            raise InvalidInput(
                "a class is certified of one input: leave --what, --over, --report, --count and --out out."
            )
        certify_source(options, label, moving, _NORMS[norm], attack, as_json)
        return
    if images is not None:
        distinct_files(read=[("SOURCE", options.source), ("--images", images)], written=[("--out", out)])
        run = _ledger_key(options, images, norm, attack and norm == "2")
        with Ledger.writing(out, run, resume) as ledger:
            rows = _images(options, images, count, run, ledger)
        _print_images(rows, as_json)
        return
    if count is not None or out is not None:
        option = "--out stores" if count is None else "--count chooses"
        raise InvalidInput(f"{option} images: give --images too.")
    named = SetText.parse(over)
    if not named.near_input or len(named.sizes) > 1:
        raise InvalidInput(f"certify takes point, or one distance from the input such as around:0.01, got {over!r}.")
    site = options.open()
    if site.x.dim() != 2:
        raise InvalidInput("one input is certified at a time: give --input of shape (n, d).")
    names = kinds_of_map(what)
    costs = {"block": expected_block_seconds, "heads": expected_seconds}
    expected = sum(costs[name](site.attention, len(site.x)) for name in names)
    region = named.sets(site.x)[0]
    assert isinstance(region, Around)
    if named.sizes and "block" in names:
        expected += expected_change_seconds(site.attention, len(site.x))
    if expected > _LONG:
        stderr().print(f"this takes about {expected:.0f} s of one core; a shorter input is quicker")
    proofs = {name: certify_tokens(site.attention, region, per_head=name == "heads") for name in names}
    if as_json:
        print_json({"setting": site.describe()} | {name: proof.to_dict() for name, proof in proofs.items()})
    else:
        _print(site, proofs)
    if report is not None:
        _report(site, region.eps or 0.0, report)
        if not as_json:
            show(f"report: {report}")


def _print(site: MapAtTokens, proofs: dict[str, Certificate]) -> None:
    show(site.in_words())
    table = Table("map", "lower bound", "upper bound (proved)", "upper ÷ lower", "proof", "seconds")
    for name, proof in proofs.items():
        ends = zip(proof.lower.reshape(-1).tolist(), proof.upper.reshape(-1).tolist(), proof.methods, strict=True)
        for number, (lower, upper, method) in enumerate(ends):
            table.add_row(
                f"head {number}" if proof.per_head else name,
                f"{written(lower, ROUND_FLOOR, 5)} ({proof.lower_holds.words()})",
                written(upper, ROUND_CEILING, 5),
                written(upper / lower, ROUND_CEILING) if lower > 0 else "–",
                method,
                f"{proof.seconds:.2f}" if number == 0 else "″",
            )
    show(table)
    proof = next(iter(proofs.values()))
    if proof.radius:
        near = "every token within" if proof.ball == "token" else "the input within"
        show(f"upper bounds: for all inputs with {near} {proof.radius:g}; lower bounds: at the input")
    for note in dict.fromkeys([*site.notes, *(note for proof in proofs.values() for note in proof.notes)]):
        show(f"note: {note}")


def _report(site: MapAtTokens, radius: float, path: Path) -> None:
    radii = ladder_radii(site.x, radius)
    with step_progress(len(radii)) as begin:
        found = ladder(site.attention, site.x, radii, progress=begin)
    write_certificates(found, path, str(site.describe()["source"]), site.in_words())


def _ledger_key(options: MapOptions, images: Path, norm: str, attack: bool) -> dict[str, Any]:
    """Everything that decides the proved radii of the images in a file."""
    files = {"network": file_digest(Path(options.source)), "images": file_digest(images)}
    return files | {"norm": norm, "attack": attack, "heads": options.heads, "howsmooth": __version__}


def _images(
    options: MapOptions, path: Path, count: int | None, run: dict[str, Any], ledger: Ledger
) -> list[dict[str, Any]]:
    device = check_device(options.device or "cpu")
    net = PatchTransformer.open(options.source, heads=options.heads).double().to(device)
    pictures, labels = (tensor.to(device) for tensor in _pictures(path, count))
    folded, patches = net.folded(), net.patches(pictures)
    with torch.no_grad():
        right = (net(pictures).argmax(-1) == labels).nonzero().flatten()
    if not len(right):
        raise InvalidInput(f"none of the {len(labels)} images in {path} is classified correctly: nothing to certify.")
    rows = {row["image"]: row for row in ledger.read_json().values()}
    missing = torch.tensor([i for i in right.tolist() if i not in rows], dtype=torch.int64)
    nearest: list[float | None] = [None] * len(missing)
    with step_progress(len(missing) + run["attack"]) as begin:
        if run["attack"] and len(missing):
            begin("attack")
            distances = minimal_norm_attack(net, pictures[missing], labels[missing]).distance
            nearest = [d if d < float("inf") else None for d in distances.tolist()]
        for index, distance in zip(missing.tolist(), nearest, strict=True):
            begin(f"image {index}")
            proof = certify_patches(folded, patches[index], int(labels[index]), _NORMS[run["norm"]])
            rows[index] = {"image": index} | proof.to_dict() | {"attacked": distance}
            ledger.write_json(f"image {index}", rows[index])
    return [rows[index] for index in right.tolist()]


def _pictures(path: Path, count: int | None) -> tuple[Tensor, Tensor]:
    tensors, _ = read_tensors(path)
    if not {"images", "labels"} <= set(tensors):
        raise InvalidInput(f"{path} must hold tensors named images and labels, it has {', '.join(sorted(tensors))}.")
    pictures, labels = tensors["images"][:count], tensors["labels"][:count].long()
    if pictures.dim() != 3 or labels.shape != pictures.shape[:1]:
        raise InvalidInput(f"images (count, side, side) and as many labels are needed, got {tuple(pictures.shape)}.")
    return (pictures.double() if pictures.is_floating_point() else pictures.double() / 255), labels


def _print_images(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    table = Table(
        "image", "label", "certified radius (proved)", "attacked at", "certified ÷ attacked", "next class", "seconds"
    )
    for row in rows:
        near = row["attacked"]
        table.add_row(
            str(row["image"]),
            str(row["label"]),
            written(row["radius"], ROUND_FLOOR),
            "–" if near is None else written(near, ROUND_CEILING),
            "–" if near is None else f"{row['radius'] / near:.2f}",
            str(row["limiting"]),
            f"{row['seconds']:.2f}",
        )
    show(table)
    radii = [row["radius"] for row in rows]
    mean = written(sum(radii) / len(radii), ROUND_FLOOR)
    least = written(min(radii), ROUND_FLOOR)
    show(f"{len(rows)} images classified correctly: mean certified radius {mean}, least {least}")
