"""One file of a run to hand on: checked, without what tells of its people and places."""
