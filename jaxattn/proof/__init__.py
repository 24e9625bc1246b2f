"""The witnesses of every law: by hand, by autodiff, by central differences."""
