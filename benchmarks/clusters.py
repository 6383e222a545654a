"""The library of clusters as tables of docs/clusters.md, from their files.

python benchmarks/clusters.py            # print them
python benchmarks/clusters.py --write    # and put them into docs/clusters.md
"""

from __future__ import annotations

import argparse

import marked

from autopar.cluster.library import CLUSTERS
from autopar.cluster.loads import price
from autopar.cluster.machine import Cluster, Level

SIZES = (16 * 1024, 1024**2, 256 * 1024**2)
KINDS = ("all_reduce", "all_gather", "all_to_all")


def rates(level: Level) -> str:
    """Pair and group in GB/s."""
    pair = level.bytes_per_second
    shown = f"{pair / 1e9:.3g}" if isinstance(pair, float) else f"0 to {max(map(max, pair)) / 1e9:.3g}"
    return f"{shown} / {level.group_bytes_per_second / 1e9:.4g}"


def library() -> list[str]:
    lines = [
        "| cluster | device | TFLOP/s reached: bf16, fp32 | memory | levels: size, topology, GB/s pair / group |",
        "|---|---|---|---|---|",
    ]
    for name, cluster in sorted(CLUSTERS.own.items()):
        device = cluster.device
        top = device.efficiency[-1][1] / 1e12
        flops = ", ".join(f"{device.flops_per_second[d] * top:.3g}" for d in ("bfloat16", "float32"))
        of_steps = "" if device.usable_bytes is None else f" of {device.memory_bytes / 1e9:.0f} GB"
        size = "unknown" if device.usable_bytes is None else f"{device.usable_bytes / 1e9:.1f}{of_steps}"
        memory = f"{size}, {device.memory_bytes_per_second / 1e9:.0f} GB/s"
        levels = "; ".join(f"{level.name} {level.size} {level.topology} {rates(level)}" for level in cluster.levels)
        lines.append(f"| `{name}` | {device.name} | {flops} | {memory} | {levels} |")
    return lines


def mesh_of(cluster: Cluster) -> tuple[int, int]:
    """Two axes: the innermost level that holds more than two devices, and four times (or as often as there
    are) across the next."""
    inner = 1
    for level in reversed(cluster.levels):
        inner *= level.size
        if inner > 2:
            break
    inner = min(inner, 16)
    return max(1, min(4, cluster.devices // inner)), inner


def collectives() -> list[str]:
    head = " | ".join(f"{size // 1024} KiB" for size in SIZES)
    lines = [f"| cluster, mesh, axis | collective | {head} |", "|---|---|" + "---|" * len(SIZES)]
    for name, cluster in sorted(CLUSTERS.own.items()):
        mesh = mesh_of(cluster)
        for which, link in zip(("outer", "inner"), cluster.links(mesh), strict=True):
            for kind in KINDS if link.ranks > 1 else ():
                prices = [price(kind, size, link) for size in SIZES]
                cells = " | ".join(f"{p.seconds() * 1e3:.3g} ms {p.algorithm}" for p in prices)
                lines.append(f"| `{name}` {mesh[0]} x {mesh[1]}, {which} | {kind} | {cells} |")
    return lines


def assumptions() -> list[str]:
    """How many figures of each file are assumptions, and how many have a source outside."""
    lines = ["| cluster | figures | of them assumptions |", "|---|---|---|"]
    for name, cluster in sorted(CLUSTERS.own.items()):
        sources = [s for table in (cluster.device, *cluster.levels) for s in table.source.values()]
        guessed = sum("assumption" in s or "order of magnitude" in s for s in sources)
        lines.append(f"| `{name}` | {len(sources)} | {guessed} |")
    return lines


def tables() -> str:
    parts = [
        "### Devices and levels",
        "Rates one way, after the file's `efficiency`.",
        "\n".join(library()),
        "### What collectives cost",
        "The cheapest algorithm, on a mesh of two axes, the second one within the innermost level of more than two "
        "devices. All groups of an axis run at once.",
        "\n".join(collectives()),
        "### What is cited and what is assumed",
        "\n".join(assumptions()),
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/clusters.md")
    options = parser.parse_args()
    print(tables())
    if options.write:
        marked.write("clusters.md", "begin: python benchmarks/clusters.py --write", f"\n{tables()}\n")


if __name__ == "__main__":
    main()
