"""Line plots as SVG text, so that a benchmark can draw without a plotting library."""

WIDTH, HEIGHT, MARGIN = 640, 400, 56
COLOURS = ("#1f6fb4", "#c8501e", "#2c8c4b", "#7a4fb0")


def line_plot(title: str, x_label: str, y_label: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """The lines by name, on axes from 0 to the largest value."""
    x_max = max((x for points in lines.values() for x, _ in points), default=1.0) or 1.0
    y_max = max((y for points in lines.values() for _, y in points), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="15">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_label}</text>',
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">{y_label}</text>',
    ]
    for step in range(5):
        parts += _grid(step / 4, x_max, y_max)
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{_x(x / x_max):.1f},{_y(y / y_max):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{40 + 16 * index}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _grid(fraction: float, x_max: float, y_max: float) -> list[str]:
    x, y = _x(fraction), _y(fraction)
    return [
        f'<line x1="{x}" y1="{_y(0)}" x2="{x}" y2="{_y(1)}" stroke="#ddd"/>',
        f'<line x1="{_x(0)}" y1="{y}" x2="{_x(1)}" y2="{y}" stroke="#ddd"/>',
        f'<text x="{x}" y="{_y(0) + 16}" text-anchor="middle">{x_max * fraction:.4g}</text>',
        f'<text x="{_x(0) - 6}" y="{y + 4}" text-anchor="end">{y_max * fraction:.4g}</text>',
    ]


def _x(fraction: float) -> float:
    return MARGIN + fraction * (WIDTH - 2 * MARGIN)


def _y(fraction: float) -> float:
    return HEIGHT - MARGIN - fraction * (HEIGHT - 2 * MARGIN)
