"""Tables of figures from the committed records. `generated.py` inserts them into the pages that ask for them.

The page's line names a figure, and its arguments may name the figure's target.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import records
from pieces import folded, table

Row = records.Row
LARGEST = 10_000  # largest number that is shown with a decimal


def number(value: float) -> str:
    return f"{value:,.1f}" if value < LARGEST else f"{value:,.0f}"


def bold(text: str, met: bool) -> str:
    return f"**{text}**" if met else text


def made_by(command: str, made: list[records.Record]) -> str:
    """Returns the line that names the program, and the origin of each of its records."""
    return f"\nBy `{command}` on {'; '.join(dict.fromkeys(records.provenance(record) for record in made))}.\n"


TARGET = "\nA target is a goal that was set before the work began ([glossary](../glossary.md)).\n"


def model() -> ModuleType:
    """Loads benchmarks/model.py, which makes its own tables."""
    return records.program(records.ROOT / "benchmarks" / "model.py")


def picture(operator: str) -> str:
    """The picture of an operator beside other packages, in a box that scrolls on a narrow screen."""
    image = f"```{{image}} /_generated/{operator}.svg\n:alt: {operator} beside other packages\n:width: 100%\n```\n"
    return f"::::{{div}} picture operator\n{image}::::\n\n"


def sizes(row: Row, first: Row) -> str:
    """Returns the sizes in which a row's call differs from the first row's; for the first row all that are not 0."""
    settings, others = row["settings"], first["settings"] if row is not first else {}
    named = [name for name, value in settings.items() if value != others.get(name, "0")]
    return ", ".join(
        f"{name} {records.number(int(settings[name])) if settings[name].isdigit() else settings[name]}"
        for name in named
    )


FIRST_ROWS = 8  # rows of a summary that are not folded


def fastest_rows(operator: str) -> tuple[list[list[str]], list[records.Record]]:
    """Returns a row for each shape of `hopwell bench`, by its fastest backend: name, sizes, ms, rate, backend."""
    made = [(row, record) for row, record in records.bench_rows(operator) if "=" not in row["shape"]]
    fastest: dict[str, Row] = {}
    for row, _ in sorted(made, key=lambda pair: -pair[0]["median_seconds"]):
        fastest[row["shape"]] = row  # the last row of a shape is the fastest
    lines = []
    for shape in dict.fromkeys(row["shape"] for row, _ in made):
        row, first = fastest[shape], fastest[made[0][0]["shape"]]
        amount, unit = (row["flops"], "TFLOP/s") if row["share_of_matmul"] else (row["bytes"], "TB/s")
        rate = amount / row["median_seconds"] / 1e12
        ms = f"{row['median_seconds'] * 1e3:.3f}"
        lines.append([shape, sizes(row, first), ms, f"{rate:.3g} {unit}", f"`{row['backend']}`"])
    return lines, [record for _, record in made]


def overview() -> str:
    """The first shape of each operator that was timed on the H200, and its time beside other packages."""
    lines, used = [], []
    for name in records.operators():
        rows, made = fastest_rows(name)
        beside = "<br>".join(f"{peer}: {span(values)}" for peer, values in ratios(name).items()) or "–"
        lines.append([f"[`{name}`](operators/{name}.md)", *rows[0][1:4], beside])
        used += made
    head = ["operator", "sizes of its first shape", "ms", "rate", "others' time ÷ Hopwell's"]
    return table(head, lines) + made_by("hopwell bench", used)


def ratios(operator: str) -> dict[str, list[float]]:
    """Returns each peer's times over Hopwell's."""
    found: dict[str, list[float]] = {}
    for row in records.peer_rows(operator):
        found.setdefault(row["peer"], []).append(row["times_as_fast"])
    return found


def span(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low} to {high} ({len(values)} shapes)" if len(values) > 1 else f"{low} (one shape)"


def summary(operator: str) -> str:
    """The beginning of a performance page: times, rates, the GPU, the peers with their versions, and the picture."""
    lines, made = fastest_rows(operator)
    head = ["shape", "other sizes", "ms", "rate", "kernel"]
    text = f"`{lines[0][0]}` is {lines[0][1]}. The other shapes have the same sizes, but for those named.\n\n"
    lines[0][1] = "–"
    text += table(head, lines[:FIRST_ROWS]) + "\n"
    if len(lines) > FIRST_ROWS:
        text += folded(f"{len(lines) - FIRST_ROWS} more shapes", table(head, lines[FIRST_ROWS:]))
    text += made_by(f"hopwell bench {operator}", made) + "\n"
    if not records.peer_rows(operator):
        return text
    record = records.peer_record(operator)[1]
    for peer, values in ratios(operator).items():
        text += f"- Beside {peer}: its time ÷ Hopwell's is {span(values)}.\n"
    installed = [f"{name} {version}" for name, version in record["versions"].items() if version != "not installed"]
    text += f"\nWith {', '.join(installed)}, on {records.provenance(record)}. "
    text += f"To repeat it: `python -m hopwell.bench {operator} --peers` ([how](../comparisons.md)).\n\n"
    return text + picture(operator)


# ---- comparisons with other packages -------------------------------------------------------------------------------


def peers(operator: str) -> str:
    """The picture and the table of an operator from `python -m hopwell.bench --peers`."""
    rows = records.peer_rows(operator)
    if not rows:
        return "No other package was timed beside it.\n"
    name, record = records.peer_record(operator)
    with_shares = all("share" in row for row in rows)
    lines = []
    for row in rows:
        low, high = row["middle_half"]
        times = [f"{us:,.0f}" if us >= 100 else f"{us:.1f}" for us in (row["us"], row["peer_us"])]
        line = [records.short_text(row), row["peer"], *times, f"{row['times_as_fast']:.2f} ({low:.2f}–{high:.2f})"]
        if with_shares:
            line.append(f"{row['share']:.2f} / {row['peer_share']:.2f}")
        lines.append(line)
    head = ["shape", "beside", "µs", "its µs", "its time ÷ Hopwell's (middle half)"]
    head += ["shares of the ceiling"] * with_shares
    defaults = records.default_shapes().get(operator, {}).items()
    shape = ", ".join(f"{name} {records.number(value)}" for name, value in defaults if value)
    installed = [f"{name} {version}" for name, version in record["versions"].items() if version != "not installed"]
    notes = sorted({f"{row['peer']}: {row['note']}" for row in rows if row.get("note")})
    notes += [f"{peer} did not run: {reason}" for peer, reason in records.peers_that_failed(operator).items()]
    text = picture(operator)
    text += f"Shape where a row names nothing else: {shape}.\n\n" if shape else ""
    text += "".join(f"- {note}\n" for note in notes)
    text += (
        f"\nTimed in turns on {records.provenance(record)}, with {', '.join(installed)}"
        + (f", by `{record['command']}`" if "command" in record else "")
        + f". Record: `benchmarks/results/h200/{name}.json`.\n"
        f"[To repeat it](../comparisons.md): `python -m hopwell.bench {operator} --peers`.\n\n"
    )
    return text + folded("Beside other packages, in figures", table(head, lines))


def beside(arguments: str) -> str:
    """`OPERATOR PEER`: shares of the matrix product for both, and the peer's time over Hopwell's, by heads and keys."""
    operator, _, peer = arguments.partition(" ")
    cells: dict[int, dict[int, str]] = {}
    for row in records.peer_rows_by_keys(operator, peer):
        text = f"{row['share']:.3f} / {row['peer_share']:.3f} / {row['times_as_fast']:.2f}"
        cells.setdefault(row["shape"]["h_q"], {})[row["shape"]["s_kv"]] = text
    keys = sorted({s_kv for of_heads in cells.values() for s_kv in of_heads})
    lines = [[f"{h_q} heads", *(of_heads.get(s_kv, "") for s_kv in keys)] for h_q, of_heads in cells.items()]
    text = table([f"share / {peer}'s / its time ÷ Hopwell's", *(f"s_kv {records.number(s)}" for s in keys)], lines)
    return text + made_by(f"python -m hopwell.bench {operator} --peers", [records.peer_record(operator)[1]])


def all_peers(where: str) -> str:
    """`MACHINE`: results of `python -m hopwell.bench` on a machine; `MACHINE/RECORD`: one record's."""
    made = [records.read(f"../{where}")] if "/" in where else records.peer_records(where)
    lines = [
        [
            f"`{row['operator']}`",
            records.shape_text(row),
            row["peer"],
            f"{row['times_as_fast']:.2f}",
            f"{row['share']:.2f} / {row['peer_share']:.2f} of the {row['ceiling']}",
        ]
        for record in made
        for row in record["results"]
        if "times_as_fast" in row
    ]
    head = ["operator", "shape", "beside", "its time ÷ Hopwell's", "shares of the ceiling"]
    return table(head, lines) + made_by("python -m hopwell.bench", made)


def alone(where: str) -> str:
    """`MACHINE/RECORD`: times and shares of a record of `python -m hopwell.bench --alone`."""
    record = records.read(f"../{where}")
    rows = record["results"]
    lines = [[records.shape_text(row), f"{row['us'] / 1000:.2f}", f"{row['share']:.3f}"] for row in rows]
    return table(["shape", "ms", f"share of the {rows[0]['ceiling']}"], lines) + made_by(
        "python -m hopwell.bench --alone", [record]
    )


def on_machine(arguments: str) -> str:
    """`MACHINE OPERATOR`: shares of the matrix product and times, from `hopwell bench` on that machine."""
    machine, operator = arguments.split()
    rows = records.bench_rows(operator, machine)
    cells: dict[str, dict[int, str]] = {}
    for row, _ in rows:
        shape, *words = row["shape"].split()
        settings = [
            word for word in words if word.split("=")[0] not in ("h_q", "s", "s_kv") and not word.endswith("=0")
        ]
        name = ", ".join([heads_of(row) or f"`{shape}`", *(f"`{word}`" for word in settings)])
        ms = row["median_seconds"] * 1e3
        time = f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"
        cells.setdefault(name, {})[keys_of(row)] = f"{row['share_of_matmul']:.3f} ({time})"
    keys = sorted({s_kv for of_name in cells.values() for s_kv in of_name})
    lines = [[name, *(of_name.get(s_kv, "") for s_kv in keys)] for name, of_name in cells.items()]
    text = table(["share of the product (ms)", *(f"s_kv {records.number(s)}" for s in keys)], lines)
    return text + made_by(f"hopwell bench {operator}", [record for _, record in rows])


def context_parallel() -> str:
    """Tokens/s of training on one GPU and on several GPUs."""
    record = records.read("../h100/context_parallel")
    one = record["results"][0]["tokens_per_second"]
    lines = [
        [
            str(row["gpus"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / one:.2f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
        ]
        for row in record["results"]
    ]
    head = ["GPUs", "tokens/s", "times one's", "GiB on each at most"]
    return table(head, lines) + made_by("benchmarks/context_parallel.py", [record])


# ---- results of `hopwell bench` ------------------------------------------------------------------------------------


def targets_of(words: list[str], made: list[tuple[Row, records.Record]]) -> dict[str, str]:
    """Returns the target of each shape that a page names: `SHAPE=0.45`, or `SHAPE=60us` for a time."""
    targets = dict(word.split("=") for word in words)
    unknown = targets.keys() - {row["shape"] for row, _ in made}
    if unknown:
        raise ValueError(f"targets for shapes that have no record: {', '.join(sorted(unknown))}")
    return targets


def in_time(row: Row, target: str) -> bool:
    return target.endswith("us") and row["median_seconds"] * 1e6 <= float(target.removesuffix("us"))


def measured(arguments: str) -> str:
    """Records of `hopwell bench`: `OPERATOR SHAPE=TARGET …`; targets are shares of the product, or µs. Bold: met."""
    operator, *words = arguments.split()
    made = records.bench_rows(operator)
    targets, lines = targets_of(words, made), []
    for row, _ in made:
        target = targets.get(row["shape"], "")
        product, read = row["share_of_matmul"], row["share_of_read"]
        reached = bool(target) and not target.endswith("us") and product >= float(target)
        line = [row["shape"], f"`{row['backend']}`", bold(number(row["median_seconds"] * 1e6), in_time(row, target))]
        line += [bold(f"{product:.3f}", reached) if product else "–", f"{read:.3f}" if read else "–"]
        lines.append(line + [target.replace("us", " µs") or "–"] * bool(targets))
    head = ["shape", "backend", "µs", "share of the matrix product", "share of reading the bytes"]
    text = table(head + ["target"] * bool(targets), lines) + (TARGET if targets else "")
    return text + made_by(f"hopwell bench {operator}", [record for _, record in made])


def bench(operator: str) -> str:
    """All records of `hopwell bench` for an operator, in a block that the reader unfolds."""
    if not records.bench_rows(operator):
        return "`hopwell bench` has no record of it.\n"
    return folded("Against the hardware, in figures", measured(operator))


def heads_of(row: Row) -> str:
    """Returns the heads of the call and of its indexer, or "" if the call has no heads of attention."""
    settings = row["settings"]
    if "h_q" not in settings:
        return ""
    index = f", {settings['h_index']} index" if "h_index" in settings else ""
    return f"{settings['h_q']}{index} heads"


def keys_of(row: Row) -> int:
    """Returns the number of keys of a call; its name depends on the operator."""
    return int(row["settings"].get("s_kv") or row["settings"]["s"])


def shares(arguments: str) -> str:
    """Shares of the matrix product by heads and keys, with their targets; bold: the first target is met.

    `OPERATOR GROUP LIMIT=VALUE,… … GROUP …`: shapes of the group `h128` are named `h128-8k` and so on, in the order
    of the values. If the record has several runs of a shape, all are shown, and all must meet a target.
    """
    operator, *words = arguments.split()
    made = [(row, record) for row, record in records.bench_rows(operator) if " " not in row["shape"]]
    columns = sorted({keys_of(row) for row, _ in made})
    lines: list[list[str]] = []
    said: dict[str, list[str]] = {}
    met: dict[str, int] = {}
    names = [word for word in words if "=" not in word]
    for name, following in zip(names, [*names[1:], None], strict=True):
        end = words.index(following) if following else len(words)
        limits = dict(word.split("=") for word in words[words.index(name) + 1 : end])
        rows = [[r for r, _ in made if r["shape"].startswith(f"{name}-") and keys_of(r) == s] for s in columns]
        heads = f"{rows[0][0]['settings']['h_q']} heads"
        least = [min(row["share_of_matmul"] for row in of_keys) for of_keys in rows]
        wanted = {limit: [float(value) for value in values.split(",")] for limit, values in limits.items()}
        for limit, values in wanted.items():
            for reached, value, s_kv in zip(least, values, columns, strict=True):
                met[limit] = met.get(limit, 0) + (reached >= value)
                said.setdefault(limit, [])
                if reached < value:
                    said[limit].append(f"{heads}, {records.number(s_kv)} by {value - reached:.3f}")
        target = next(iter(wanted.values()), [2.0] * len(columns))
        cells = []
        for of_keys, reached, value in zip(rows, least, target, strict=True):
            text = ", ".join(f"{row['share_of_matmul']:.3f}" for row in of_keys)
            rates = ", ".join(f"{row['flops'] / row['median_seconds'] / 1e12:.0f}" for row in of_keys)
            cells.append(bold(text, reached >= value) + f" ({rates})")
        lines.append([heads, *cells])
        lines += [[f"… {limit}", *(f"{value:.2f}" for value in values)] for limit, values in wanted.items()]
    head = ["share of the product (TFLOP/s)", *(f"s_kv {records.number(s)}" for s in columns)]
    text = table(head, lines) + "\n"
    for limit, missed in said.items():
        text += f"The {limit} is met in {met[limit]} of {met[limit] + len(missed)}"
        text += f"; missed: {'; '.join(missed)}. " if missed else ". "
    spreads = [row["spread"] for row, _ in made]
    text += f"Spread, (largest − smallest) ÷ median: {min(spreads):.2f} to {max(spreads):.2f}.\n"
    return text + TARGET + made_by(f"hopwell bench {operator}", [record for _, record in made])


def settings(arguments: str) -> str:
    """The cost of settings: each time, next to the time of the same shape without the setting, in the same run.

    `OPERATOR SETTING<TARGET …`: the largest ratio of times that meets the target; bold: met.
    """
    operator, *words = arguments.split()
    targets = dict(word.split("<") for word in words)
    made = records.bench_rows(operator)
    plain = {row["shape"]: row["settings"] for row, _ in made if " " not in row["shape"]}
    lines, used = [], []
    for row, record in made:
        shape, _, setting = row["shape"].partition(" ")
        without = [r for r, _ in made if r["settings"] == plain[shape] and r.get("run") == row.get("run")]
        if not setting or row["settings"] == plain[shape] or not without:
            continue
        ratio = row["median_seconds"] / without[0]["median_seconds"]
        times = [f"{r['median_seconds'] * 1e3:.2f}" for r in (row, without[0])]
        target = targets.get(setting)
        reached = bold(f"{ratio:.2f}", target is not None and ratio <= float(target))
        lines.append([shape, f"`{setting}`", *times, reached, target or "–"])
        used.append(record)
    text = table(["shape", "setting", "ms", "without it, ms", "time ÷ time without it", "target"], lines) + TARGET
    return text + made_by(f"hopwell bench {operator} --shape SHAPE,SETTING", used)


def over_read(arguments: str) -> str:
    """Times over the time to read the same bytes: `OPERATOR SHAPE=TARGET …`; targets are ratios, or µs. Bold: met."""
    operator, *words = arguments.split()
    made = records.bench_rows(operator)
    targets, lines = targets_of(words, made), []
    for row, _ in made:
        ratio, target = 1 / row["share_of_read"], targets.get(row["shape"], "")
        reached = bool(target) and not target.endswith("us") and ratio <= float(target)
        us = bold(number(row["median_seconds"] * 1e6), in_time(row, target))
        line = [row["shape"], f"`{row['backend']}`", us, bold(f"{ratio:.3f}", reached)]
        lines.append([*line, target.replace("us", " µs") or "–"])
    text = table(["shape", "backend", "µs", "time ÷ reading the bytes", "target"], lines) + TARGET
    return text + made_by(f"hopwell bench {operator}", [record for _, record in made])


def few_columns(arguments: str) -> str:
    """nvfp4_linear of 1, 8 and 16 columns by its faster backend; `8=TARGET 16=TARGET`: time over one column's time."""
    targets = {n: float(target) for n, target in (word.split("=") for word in arguments.split())}
    made = records.bench_rows("nvfp4_linear")
    fastest: dict[tuple[str, str], dict[str, Row]] = {}
    for row, _ in sorted(made, key=lambda pair: -pair[0]["median_seconds"]):
        layer = row["settings"]["N"], row["settings"]["K"]
        fastest.setdefault(layer, {})[row["settings"]["n"]] = row  # the last row is the fastest
    lines, met = [], dict.fromkeys(targets, 0)
    for (rows, k), columns in sorted(fastest.items(), key=lambda item: -int(item[0][0]) * int(item[0][1])):
        cells = []
        for n in ("1", *targets):
            row = columns[n]
            text = f"{row['median_seconds'] * 1e6:.1f}"
            read = f"{1 / row['share_of_read']:.2f}"
            if n in targets:
                ratio = row["median_seconds"] / columns["1"]["median_seconds"]
                met[n] += ratio <= targets[n]
                text += f" ({bold(f'{ratio:.2f}', ratio <= targets[n])}; {read}), {row['backend']}"
            else:
                text += f" ({read}), {row['backend']}"
            cells.append(text)
        lines.append([f"{rows} × {k}", *cells])
    text = table(["N × K", *(f"n = {n}" for n in ("1", *targets))], lines)
    text += "\nµs. In brackets: n = 1 over reading the same bytes; more columns over n = 1, and over reading.\n"
    said = [
        f"n = {n} over n = 1, at most {target:.2f}: met in {met[n]} of {len(lines)}" for n, target in targets.items()
    ]
    return text + "\n" + "; ".join(said) + ".\n" + made_by("hopwell bench nvfp4_linear", [r for _, r in made])


def many_columns(arguments: str) -> str:
    """nvfp4_linear with many columns, and the other ways to the same product, from benchmarks/columns.py."""
    record = records.read("nvfp4_columns")
    ways = ("sm90", "sm80", "dequantise", "matmul")
    lines: dict[tuple[int, int], list[str]] = {}
    for row in record["results"]:
        if str(row["n"]) in arguments.split():
            us = row["us"]
            text = [f"{us[way]:.{0 if us[way] >= 100 else 1}f}" if way in us else "–" for way in ways]
            text[0] = bold(text[0], us.get("sm90") == min(us[way] for way in ways[:3] if way in us))
            lines.setdefault((row["rows"], row["k"]), []).append(" / ".join(text))
    head = ["N × K", *(f"n = {n}" for n in arguments.split())]
    text = table(head, [[f"{rows} × {k}", *cells] for (rows, k), cells in lines.items()])
    return text + made_by("benchmarks/columns.py", [record])


def cpu_targets() -> str:
    """The CPU's targets and results, from the latest record of benchmarks/cpu.py."""
    path = max((records.FOLDER.parent / "cpu").glob("2*.json"))
    record = records.read(f"../cpu/{path.stem}")
    lines = []
    for row in record["bars"]:
        least = "at_least" in row
        target = row["at_least"] if least else row["at_most"]
        met = row["measured"] >= target if least else row["measured"] <= target
        limit = f"{'≥' if least else '≤'} {target:g}"
        lines.append([row["bar"].replace("_", r"\_"), limit, bold(f"{row['measured']:.2f}", met)])
    machine = {**record["machine"], "device": f"{record['machine']['processor']}, {record['machine']['cores']} cores"}
    return table(["what", "target", "reached"], lines) + made_by("benchmarks/cpu.py", [machine])


# ---- whole models, and limits of kernels ---------------------------------------------------------------------------


def training_step() -> str:
    """Times of the steps of benchmarks/training_step.py."""
    record = records.read("training_step")
    rows = [
        [
            row["model"],
            records.number(row["s"]),
            f"{row['ms']:.0f}",
            f"{row['share']:.2f}",
            f"{row['times_as_fast_as_dense']:.2f}",
        ]
        for row in record["results"]
    ]
    text = table(["model", "tokens", "ms a layer", "share of the floor", "dense attention's time ÷ Hopwell's"], rows)
    return text + f"\nBy `benchmarks/training_step.py` on {records.provenance(record)}.\n"


def training_step_parts() -> str:
    """Times of the parts of these steps: milliseconds, and the share of the floor."""
    record = records.read("training_step")
    lines = []
    for model in dict.fromkeys(row["model"] for row in record["results"]):
        steps = [row for row in record["results"] if row["model"] == model]
        for parts in zip(*(step["parts"] for step in steps), strict=True):
            cells = [f"{part['ms']:.1f} ({part['share']:.2f})" for part in parts]
            lines.append([f"{model}: {parts[0]['part']}", *cells])
        lines += [
            [f"**{model}: the step**", *(f"**{step['ms']:.0f} ({step['share']:.2f})**" for step in steps)],
            [
                "… dense attention, cuDNN by PyTorch, of the step",
                *(f"{s['times_as_fast_as_dense']:.2f} ×" for s in steps),
            ],
            ["… memory beside inputs, GiB", *(f"{step['peak_bytes_beside_inputs'] / 2**30:.1f}" for step in steps)],
        ]
    tokens = [f"s {records.number(step['s'])}" for step in steps]
    text = table(["ms (share of the floor)", *tokens], lines)
    return text + f"\nBy `benchmarks/training_step.py` on {records.provenance(record)}.\n"


def warm_up(target: str) -> str:
    """The dense warm-up of benchmarks/training_step.py; `TARGET`: the target of the loss's share."""
    record = records.read("warm_up")
    lines = []
    for row in record["results"]:
        forward, loss = row["parts"]
        share = bold(f"{loss['share']:.3f}", loss["share"] >= float(target))
        memory = f"{loss['peak_bytes_beside_inputs'] / 2**20:,.0f}"
        line = [row["model"], records.number(row["s"]), f"{loss['ms']:,.0f}", share, memory]
        lines.append([*line, f"{forward['ms']:,.0f}", f"{forward['share']:.3f}"])
    head = ["model", "tokens", "loss and gradients, ms", f"share (target {target})", "memory beside inputs, MiB"]
    head += ["forward without indices, ms", "share"]
    return table(head, lines) + made_by("benchmarks/training_step.py --warm-up", [record])


def calls() -> str:
    """Results of benchmarks/calls.py on a CPU and on the host of an H200."""
    gpu = records.read("calls")
    cpu = records.read("../cpu/calls")
    of_linear = {row["name"]: row["of_linear"] for row in gpu["results"]}
    rows = [[f"`{row['name']}`", f"{row['of_linear']:.1f}", f"{of_linear[row['name']]:.2f}"] for row in cpu["results"]]
    made = f"\nBy `benchmarks/calls.py` on {records.provenance(cpu)}; {records.provenance(gpu)}.\n"
    return table(["call", "CPU", "H200"], rows) + made


def thread_pools() -> str:
    """Results of benchmarks/thread_pools.py: a table for each machine with a record."""
    text = ""
    for path in sorted(records.FOLDER.parent.glob("*/thread_pools.json")):
        record = records.read(f"../{path.parent.name}/thread_pools")
        figures = ("median_us", "mean_us", "us_99", "largest_us")
        rows = [[row["line"], row["call"], *(f"{row[name]:,.0f}" for name in figures)] for row in record["results"]]
        text += table(["in turns", "call", "median, µs", "mean", "99 %", "largest"], rows)
        text += made_by("benchmarks/thread_pools.py", [record]).rstrip()
        low, high = min(record["load"]), max(record["load"])
        text += f" Load {low:.1f} to {high:.1f} on {record['processors']} processors.\n\n"
    return text


def decode() -> str:
    """Results of benchmarks/decode.py."""
    record = records.read("decode")
    rows = [
        [
            row["name"].replace(" | ", " against "),
            *(f"{row[rate]:,.0f}" for rate in ("tokens_per_s", "pytorch_tokens_per_s")),
            f"{row['times_as_fast']:.2f}",
        ]
        for row in record["results"]
    ]
    made = f"\nBy `benchmarks/decode.py` on {records.provenance(record)}, torch {record['torch']}.\n"
    return table(["", "tokens/s", "PyTorch", "times"], rows) + made


def limits() -> str:
    """Counters of Nsight Compute from benchmarks/limits.py."""
    record = records.read("limits")
    units = ["memory", "L2", "shared memory", "issue", "logic", "tensor cores"]
    rows = []
    for row in record["results"]:
        stalls = (f"{name.replace('_', ' ')} {warps:.1f}" for name, warps in row["stalls_per_issue"].items())
        percents = [f"{row['percent'][unit]:.0f}" for unit in units]
        rows.append([f"{row['call']}, `{row['kernel']}`", *percents, ", ".join(stalls)])
    made = f"\nBy `benchmarks/limits.py` on {records.provenance(record)}; kernels have the names of that day.\n"
    return table(["call, kernel", *units, "stalls"], rows) + made


def streamindex() -> str:
    """Times of benchmarks/streamindex.py beside the published ones."""
    record = records.read("streamindex")
    rows = [
        [
            f"{row['tokens']:,}",
            number(1e3 * row["seconds"]),
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['published_ms']:,.0f}",
            f"{row['published_ms'] / (1e3 * row['seconds']):.1f}",
        ]
        for row in record["results"]
    ]
    header = ["tokens", "ms", "most memory, GB", "StreamIndex, ms, published", "times"]
    return table(header, rows) + made_by("benchmarks/streamindex.py", [record])


def model_counts() -> str:
    """The emulator's counts next to an H200's counters, in million cycles per multiprocessor."""
    counts, _ = model().hopper(records.FOLDER.parent)
    return table(*counts) + made_by("benchmarks/model.py count", [records.read("../emulator/sm90")])


def model_times() -> str:
    """The model's predictions next to an H200's cycles: a step and a query by unit, and a whole call."""
    _, times = model().hopper(records.FOLDER.parent)
    return table(*times) + made_by("benchmarks/model.py counters", [records.read("model")])


def model_blackwell() -> str:
    """The model's cycles of the kernels for Blackwell."""
    return table(*model().blackwell(records.FOLDER.parent)) + made_by(
        "benchmarks/model.py count", [records.read("../emulator/sm100")]
    )


def model_products() -> str:
    """The model's cycles of nvfp4_matmul's tiles, whose limit is the copies."""
    program = model()
    return table(*program.blackwell(records.FOLDER.parent, program.PRODUCTS)) + made_by(
        "benchmarks/model.py count", [records.read("../emulator/sm100")]
    )


GENERATORS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        overview,
        summary,
        peers,
        beside,
        all_peers,
        alone,
        context_parallel,
        measured,
        bench,
        shares,
        settings,
        over_read,
        few_columns,
        many_columns,
        cpu_targets,
        training_step,
        training_step_parts,
        warm_up,
        on_machine,
        calls,
        thread_pools,
        decode,
        limits,
        streamindex,
        model_counts,
        model_times,
        model_blackwell,
        model_products,
    )
}
