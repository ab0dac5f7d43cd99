"""`python -m evidence [page …]`: make the evidence pages of the documentation anew."""

from __future__ import annotations

import sys

from rich.console import Console

from evidence import (
    bound_ascents,
    certificates,
    certified_balls,
    certified_networks,
    certified_sentences,
    certified_steps,
    certified_training,
    composition,
    damage,
    damaged_files,
    early_warnings,
    engine_faults,
    engines,
    fuzz_api,
    fuzz_commands,
    inversion,
    jacobian_grid,
    known_spectra,
    l2_open_question,
    large_models,
    large_stores,
    layer_ascents,
    log_determinants,
    lower_bounds,
    model_variants,
    mutations,
    near_identity,
    offsets,
    point_rounding,
    queues,
    read_networks,
    real_heads,
    reference_values,
    rounded_caches,
    rounding_grid,
    scan_faults,
    scans,
    sequence_flows,
    token_norms,
    training_curriculum,
    training_depth,
    training_grid,
    uninitialised_memory,
    wasserstein,
    worst_case_gpt2,
    worst_case_real,
    worst_case_references,
)
from evidence.tables import write

PAGES = {
    "jacobian": jacobian_grid,
    "offsets": offsets,
    "uninitialised-memory": uninitialised_memory,
    "known-spectra": known_spectra,
    "certificates": certificates,
    "certified-balls": certified_balls,
    "changed-proofs": mutations,
    "certified-networks": certified_networks,
    "read-networks": read_networks,
    "certified-training": certified_training,
    "certified-sentences": certified_sentences,
    "near-identity": near_identity,
    "rounding": rounding_grid,
    "rounded-caches": rounded_caches,
    "steps": certified_steps,
    "bounds": bound_ascents,
    "point-rounding": point_rounding,
    "lower-bounds": lower_bounds,
    "reference-values": reference_values,
    "real-heads": real_heads,
    "wasserstein": wasserstein,
    "composition": composition,
    "l2-open-question": l2_open_question,
    "model-variants": model_variants,
    "token-norms": token_norms,
    "damaged-files": damaged_files,
    "fuzz-api": fuzz_api,
    "scan-faults": scan_faults,
    "engines": engines,
    "engine-faults": engine_faults,
    "queues": queues,
    "fuzz-commands": fuzz_commands,
    "scans": scans,
    "damage": damage,
    "large-stores": large_stores,
    "large-models": large_models,
    "worst-case-references": worst_case_references,
    "worst-case-gpt2": worst_case_gpt2,
    "worst-case-real": worst_case_real,
    "layers": layer_ascents,
    "inversion": inversion,
    "log-determinants": log_determinants,
    "sequence-flows": sequence_flows,
    "training-grid": training_grid,
    "training-depth": training_depth,
    "early-warnings": early_warnings,
    "training-curriculum": training_curriculum,
}


def main(names: list[str]) -> int:
    console = Console(stderr=True)
    unknown = [name for name in names if name not in PAGES]
    if unknown:
        console.print(f"unknown page {unknown[0]!r}: choose from {', '.join(PAGES)}.")
        return 2
    for name in names or PAGES:
        page = PAGES[name]
        with console.status(f"{name} …") as status:
            parts = page.parts(lambda text, name=name, status=status: status.update(f"{name}: {text}"))  # type: ignore[misc]
        print(write(name, page.TITLE, parts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
