"""A PDF by hand: pages of lines in Helvetica, small enough to read, real enough for a reader.

path.write_bytes(pdf([["first page"], ["second page", "its second line"]]))
"""

from __future__ import annotations

from collections.abc import Sequence


def pdf(pages: Sequence[Sequence[str]], *, trailer: str = "", objects: Sequence[str] = ()) -> bytes:
    """The bytes of a PDF.

    Args:
        pages: lines of each page, printable ASCII; a page without lines holds a drawn rectangle and no text.
        trailer: more entries of the trailer, for instance `/Encrypt ... `.
        objects: bodies of more objects; they are numbered from 4 + 2 * len(pages) on.
    """
    bodies = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(f'{4 + 2 * n} 0 R' for n in range(len(pages)))}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, lines in enumerate(pages):
        shown = " T*\n".join(f"({_escaped(line)}) Tj" for line in lines)
        content = f"BT /F1 12 Tf 14 TL 72 720 Td\n{shown}\nET" if lines else "72 72 200 200 re f"
        bodies.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        bodies.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    bodies.extend(objects)
    out, places = b"%PDF-1.7\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = len(out)
    out += f"xref\n0 {len(bodies) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010d} 00000 n \n".encode() for place in places)
    out += f"trailer\n<< /Size {len(bodies) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{table}\n%%EOF\n".encode()
    return out


def _escaped(line: str) -> str:
    return line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
