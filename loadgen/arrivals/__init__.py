"""When requests are sent, and which: processes, traces, datasets, timetables."""
