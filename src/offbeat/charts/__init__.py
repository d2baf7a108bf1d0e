"""Charts as SVG, drawn in one place: for files that stand alone, and for pages, whose script adds hovering and zoom."""

from offbeat.charts.axes import Figure
from offbeat.charts.bar_chart import BarChart, Bars, ShareChart
from offbeat.charts.labelled_lines import Line, Run, line_chart
from offbeat.charts.line_chart import LineChart, Series

__all__ = ["BarChart", "Bars", "Figure", "Line", "LineChart", "Run", "Series", "ShareChart", "line_chart"]
