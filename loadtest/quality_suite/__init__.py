"""A suite of tasks for many policies and peers at equal budgets: in process, and by API.

Only ``judging`` knows ``calib_cluster``; only ``openai_api`` speaks HTTP. ``command.run`` is the
way in.
"""
