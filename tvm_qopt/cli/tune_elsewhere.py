"""`tvm-qopt tune --pack` and `--measured`: kernels that run where there is no compiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_qopt.cli.report import print_json, print_note, print_table, waiting
from tvm_qopt.cli.tune_view import view_of_search, words
from tvm_qopt.errors import RecordInvalid, UnknownName, UnsupportedSpec
from tvm_qopt.targets import TargetPreset

if TYPE_CHECKING:
    from tvm_qopt.compiler.tune import Found
    from tvm_qopt.packed import Search
    from tvm_qopt.spec import KernelSpec


def pack(
    specs: Sequence[KernelSpec],
    preset: TargetPreset,
    folder: Path,
    *,
    python: str | None,
    size: int,
    trials: int,
    seed: int,
    json: bool,
) -> None:
    """Fill a folder with kernels and what measures them, and say what to do with it."""
    from tvm_qopt.compiler.elsewhere import pack_search
    from tvm_qopt.devices import surroundings
    from tvm_qopt.packed import Pack, write_json
    from tvm_qopt.runtime.store import defining_modules

    for spec in specs:
        if modules := defining_modules(spec):
            raise UnsupportedSpec(
                f"--pack: {spec.name} is defined in {', '.join(modules)}, which is not packed"
            )
    surroundings.new_folder(folder)
    searches = {}
    for spec in specs:
        with waiting(f"building the kernels of {spec.name}"):
            searches[spec.name] = pack_search(
                spec, preset, folder, elements=size, trials=trials, seed=seed
            )
    surroundings.add_surroundings(folder, preset.kind, python or surroundings.THIS_PYTHON)
    surroundings.write_script(folder)
    write_json(Pack(preset.name, preset.kind, searches), folder)
    _report(folder, preset, searches, surroundings.check_size(folder), json=json)


def _report(
    folder: Path, preset: TargetPreset, searches: dict[str, Search], size: int, *, json: bool
) -> None:
    for name, search in searches.items():
        for each in search.candidates:
            if each.error:
                print_note(f"failed: {name}: {words(each.decisions)}: {each.error}")
    if json:
        counts = {name: len(search.candidates) for name, search in searches.items()}
        print_json({"packed": str(folder.resolve()), "bytes": size, "kernels": counts})
        return
    rows = [[name, str(len(search.candidates))] for name, search in searches.items()]
    print_table(f"packed in {folder}, {size / (1 << 20):.1f} MiB", ["spec", "kernels"], rows)
    print_note(
        f"on the machine: python {folder}/measure.py; then here: tvm-qopt tune "
        f"{' '.join(searches)} --target {preset.name} --measured {folder}"
    )


def take(
    specs: Sequence[KernelSpec], preset: TargetPreset, folder: Path, measured: Path
) -> list[Found]:
    """Records of what was measured of a pack."""
    from tvm_qopt.compiler.elsewhere import MeasuredElsewhere
    from tvm_qopt.compiler.tune import take_measured
    from tvm_qopt.packed import read_measured, read_pack

    pack = read_pack(measured)
    if pack.target != preset.name:
        raise RecordInvalid(
            f"--measured: {measured} was packed for {pack.target}, and --target is {preset.name}"
        )
    for spec in specs:
        if spec.name not in pack.searches:
            raise UnknownName(f"spec in --measured {measured}", spec.name, pack.searches)
    got, found = read_measured(measured), []
    for spec in specs:
        search = pack.searches[spec.name]
        laboratory = MeasuredElsewhere(search, got.results[spec.name], got.device)
        with view_of_search() as view:
            found.append(take_measured(spec, preset, folder, search, laboratory, view.show))
    return found
