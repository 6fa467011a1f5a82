"""The lab's commands, which `kvweave` finds through the entry-point group kvweave.commands."""
