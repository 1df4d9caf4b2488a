"""Numbers as people read them."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """1536 -> "1.50 KiB": three significant digits in the binary unit that suits the number."""
    value = float(count)
    for unit in UNITS:
        if abs(value) < 1000 or unit == UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"
