#!/usr/bin/env python3
"""Prints what an SVG plot shows, as JSON; fails where it is not well-formed XML.

    svg_summary.py FILE
"""
import json
import sys
import xml.etree.ElementTree as ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def points(group):
    """The stretches of points of a series, each a list of [x, y]."""
    stretches = []
    for element in group:
        if element.tag == SVG + "polyline":
            stretches.append([[float(number) for number in point.split(",")]
                              for point in element.get("points").split()])
        else:
            assert element.tag == SVG + "circle", element.tag
            stretches.append([[float(element.get("cx")), float(element.get("cy"))]])
    return stretches


def texts(root, name):
    return [element.text for element in root.iter(SVG + "text")
            if element.get("class") == name]


def summary(root):
    assert root.tag == SVG + "svg", root.tag
    frame = next(r for r in root.iter(SVG + "rect") if r.get("class") == "frame")
    return {
        "view_box": [float(number) for number in root.get("viewBox").split()],
        "frame": [float(frame.get(name)) for name in ("x", "y", "width", "height")],
        "title": root.find(SVG + "title").text,
        "texts": texts(root, None),
        "legend": texts(root, "legend"),
        "x_ticks": texts(root, "x-tick"),
        "y_ticks": texts(root, "y-tick"),
        "y_tick_positions": [float(element.get("y")) for element in root.iter(SVG + "text")
                             if element.get("class") == "y-tick"],
        "series": [points(group) for group in root.iter(SVG + "g")
                   if group.get("class") == "series"],
    }


if __name__ == "__main__":
    print(json.dumps(summary(ElementTree.parse(sys.argv[1]).getroot())))
