"""From a config to what is drawn, started, moved, scored and measured."""
