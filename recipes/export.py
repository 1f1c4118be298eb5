def export_checkpoint(*a): pass
def plot_curves(*a): pass
