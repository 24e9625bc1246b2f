"""Every law by three witnesses: by hand, by autodiff, by central difference."""
