"""A comparison as one HTML page that needs no network: `lowprec compare --html`.

Python writes what is text (sections.py) and packs what is drawn (numbers.py); the scripts beside this file, inlined as
they are (document.py), draw it in the browser: scale.js (values to pixels), series.js (packed numbers to curves),
chart.js (curves to hover and zoom), panels.js (final gaps), heatmap.js (roundings, layer by step), contents.js (what
the charts show), page.js (the controls). They are ours, so a page carries no library and no licence but the project's.
"""
