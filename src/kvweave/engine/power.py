"""Whether the machine runs on mains power."""

import psutil


def on_mains() -> bool:
    """False only where a battery says that it is being used."""
    sensors = getattr(psutil, "sensors_battery", None)  # not on every platform
    battery = sensors() if sensors is not None else None
    return battery is None or battery.power_plugged is not False
