"""Reading every entry in full and comparing it with its row: what is broken, said and not yet mended."""

from dataclasses import dataclass, field

from kvweave.errors import DamagedEntry, StoreTooNew
from kvweave.store.catalog import Catalog
from kvweave.store.disk import DiskTier
from kvweave.store.format import verify_content


@dataclass(slots=True)
class Findings:
    """`damaged`, `newer` and `unopened` give for a file's name what is wrong; `checked` files were read in full.

    `sizes` gives those of whole files that are counted with another size.
    """

    checked: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    newer: dict[str, str] = field(default_factory=dict)
    unopened: dict[str, str] = field(default_factory=dict)


def check_entries(catalog: Catalog, tier: DiskTier) -> Findings:
    """Read every listed file, one after the other, holding none of them in memory; changes nothing."""
    findings = Findings()
    for name, (key, counted) in catalog.stated_by_file().items():
        try:
            stored = tier.open(name)
            verify_content(stored.content)
            size = tier.size_bytes(name)
        except FileNotFoundError:
            findings.damaged[name] = f"{tier.folder / name} is missing"
        except StoreTooNew as error:
            findings.newer[name] = str(error)
        except DamagedEntry as error:
            findings.damaged[name] = str(error)
        except OSError as error:  # no permission, no descriptors left: the entry itself may be whole
            findings.unopened[name] = str(error)
        else:
            findings.checked += 1
            if stored.key.digest != key:
                findings.damaged[name] = f"{tier.folder / name} holds entry {stored.key.digest}, not {key}"
            elif size != counted:
                findings.sizes[name] = size
    return findings
