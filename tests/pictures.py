# SPDX-License-Identifier: Apache-2.0
"""Pictures (SVG of matplotlib): what two of them do not both show."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np


def marks_of(part, texts, marks):
    """Collect what an SVG element shows: strings, and points [n, 2] of lines and areas."""
    kind = part.tag.rpartition("}")[2]
    if kind == "defs" or part.get("id", "").startswith("legend"):
        return
    if kind == "text":
        texts.append("".join(part.itertext()).strip())
    elif kind == "path":
        numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", part.get("d"))
        marks.append((part.get("style"), np.array(numbers, dtype=np.float64).reshape(-1, 2)))
    for each in part:
        marks_of(each, texts, marks)


def plots_of(path):
    """Strings and marks of each plot of a picture, these within the extent of all of the plot.

    Where the plots lie, and how large they are, is up to fonts and to matplotlib's version.
    """
    found = []
    for part in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}g"):
        if not re.fullmatch(r"axes_\d+", part.get("id", "")):
            continue
        texts, marks = [], []
        marks_of(part, texts, marks)
        points = np.concatenate([points for _, points in marks])
        low, high = points.min(0), points.max(0)
        found.append((texts, [(style, (p - low) / (high - low)) for style, p in marks]))
    return found


def differences(one, other):
    """What two pictures do not both show."""
    one, other = plots_of(one), plots_of(other)
    if len(one) != len(other):
        return [f"{len(one)} plots, {len(other)}"]
    said = []
    for plot, ((texts, marks), (their_texts, their_marks)) in enumerate(
        zip(one, other, strict=True)
    ):
        if texts != their_texts:
            said.append(f"plot {plot}: {texts}, {their_texts}")
        if len(marks) != len(their_marks):
            said.append(f"plot {plot}: {len(marks)} marks, {len(their_marks)}")
        for (style, points), (their_style, theirs) in zip(marks, their_marks, strict=False):
            same = style == their_style and points.shape == theirs.shape
            if not same or np.abs(points - theirs).max() > 1e-3:
                said.append(f"plot {plot}: a mark of {style}, {their_style}")
    return said
