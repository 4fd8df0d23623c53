"""A load tester for anyone's deployment: ``layertap load URL``. It knows the server by HTTP only, and needs no torch.

From Python: ``run(find_scenario("digits"), Options(url, connections=64, duration=10)).total.goodput``.
"""
