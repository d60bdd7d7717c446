"""The composition: a graph and a cluster become a plan, in eight steps, a folder each.

    model         the request, pins as restrictions, the graph with its equal layers folded
    space         the candidates: devices x stages x mesh x micro-batches x mode
    tables        prices of every choice on a candidate's mesh
    solve         the tables' best choices within the memory of devices and hosts
    stages        a solution cut into pipeline stages
    programs      solutions as programs: priced to the last collective, and written as a plan
    bounds        seconds that no plan of a candidate undercuts
    outer_search  best first over the candidates

Imports run down this list only. `planner.py` composes the steps.
"""
