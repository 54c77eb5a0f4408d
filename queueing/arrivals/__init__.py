"""Which requests come, and when: arrival processes, recorded traces, timetables."""
