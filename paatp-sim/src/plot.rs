//! Plots as SVG, by hand: axes, lines and a legend are all that is needed.

use std::fmt::Write as _;

/// A line in a plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Its name in the legend; lines of one name have one colour and one entry.
    pub name: String,
    /// Its points.
    pub points: Vec<(f64, f64)>,
    /// Drawn as steps, as a distribution is.
    pub steps: bool,
}

/// A plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// Over it.
    pub title: String,
    /// The line below, which may be long.
    pub subtitle: String,
    /// Below it.
    pub x: String,
    /// Beside it.
    pub y: String,
    /// What is drawn.
    pub lines: Vec<Line>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Entries of the legend at most.
const MOST_ENTRIES: usize = 18;
/// Colours that people with colour-blindness can tell apart (Okabe and Ito), then the same ones again.
const COLOURS: [&str; 8] =
    ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A00"];

impl Plot {
    /// The file's text.
    #[must_use]
    pub fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(0.0, f64::max);
        let (x_most, y_most) = (nice(most(|p| p.0)), nice(most(|p| p.1)));
        let place = |(x, y): (f64, f64)| {
            let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
            (LEFT + x / x_most * wide, HEIGHT - BOTTOM - y / y_most * high)
        };
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
        );
        let _ = writeln!(text, "<text x=\"{LEFT}\" y=\"15\" font-size=\"14\">{}</text>", escape(&self.title));
        let _ =
            writeln!(text, "<text x=\"{LEFT}\" y=\"31\" font-size=\"11\">{}</text>", escape(&self.subtitle));
        self.axes(&mut text, (x_most, y_most), place);
        let mut names: Vec<&str> = Vec::new();
        for line in &self.lines {
            let index = names.iter().position(|name| *name == line.name).unwrap_or_else(|| {
                names.push(&line.name);
                names.len() - 1
            });
            let colour = COLOURS[index % COLOURS.len()];
            let _ = writeln!(
                text,
                "<path d=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.3\" stroke-opacity=\"0.8\"/>",
                path(line, place)
            );
        }
        for (index, name) in names.iter().take(MOST_ENTRIES).enumerate() {
            let (x, y) = (WIDTH - RIGHT + 14.0, TOP + 12.0 + index as f64 * 18.0);
            let _ = writeln!(
                text,
                "<path d=\"M{x} {y}h18\" stroke=\"{}\" stroke-width=\"3\"/><text x=\"{}\" y=\"{}\">{}</text>",
                COLOURS[index % COLOURS.len()],
                x + 24.0,
                y + 4.0,
                escape(name)
            );
        }
        text + "</svg>\n"
    }

    fn axes(&self, text: &mut String, most: (f64, f64), place: impl Fn((f64, f64)) -> (f64, f64)) {
        for step in 0..=5 {
            let (x_value, y_value) = (most.0 * f64::from(step) / 5.0, most.1 * f64::from(step) / 5.0);
            let ((x, bottom), (left, y)) = (place((x_value, 0.0)), place((0.0, y_value)));
            let right = WIDTH - RIGHT;
            let _ = writeln!(
                text,
                "<path d=\"M{left} {y:.1}H{right}M{x:.1} {bottom}v5\" stroke=\"#ccc\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                bottom + 18.0,
                number(x_value),
                left - 6.0,
                y + 4.0,
                number(y_value)
            );
        }
        let (middle_x, middle_y) = ((LEFT + WIDTH - RIGHT) / 2.0, (TOP + HEIGHT - BOTTOM) / 2.0);
        let _ = writeln!(
            text,
            "<text x=\"{middle_x}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(16 {middle_y}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 10.0,
            escape(&self.x),
            escape(&self.y)
        );
    }
}

fn path(line: &Line, place: impl Fn((f64, f64)) -> (f64, f64)) -> String {
    let mut text = String::new();
    for (index, point) in line.points.iter().enumerate() {
        let (x, y) = place(*point);
        let _ = match index {
            0 => write!(text, "M{x:.1} {y:.1}"),
            _ if line.steps => write!(text, "H{x:.1}V{y:.1}"),
            _ => write!(text, "L{x:.1} {y:.1}"),
        };
    }
    text
}

/// The next number of 1, 2, 2.5 or 5 times a power of ten that five equal steps divide well.
fn nice(most: f64) -> f64 {
    let mut scale = 1.0;
    while scale * 10.0 < most {
        scale *= 10.0;
    }
    while scale >= most && scale > 1e-9 {
        scale /= 10.0;
    }
    [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * scale).into_iter().find(|nice| *nice >= most).unwrap_or(1.0)
}

fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() { "0".into() } else { text.into() }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_its_lines_and_legend() {
        let line = |name: &str, steps| Line {
            name: name.into(),
            points: vec![(0.0, 0.0), (1.0, 40.0), (2.0, 30.0)],
            steps,
        };
        let plot = Plot {
            title: "a < b".into(),
            subtitle: "of c".into(),
            x: "ms".into(),
            y: "chunks".into(),
            lines: vec![line("one", false), line("one", false), line("two", true)],
        };
        let svg = plot.svg();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains("a &lt; b"));
        assert_eq!(svg.matches("stroke-width=\"1.3\"").count(), 3);
        assert_eq!(svg.matches("stroke-width=\"3\"").count(), 2);
        // The highest point is at four fifths of 50.
        assert!(svg.contains("L390.0 106.0"), "{svg}");
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([nice(0.7), nice(40.0), nice(2.2), nice(10.0)], [1.0, 50.0, 2.5, 10.0]);
        assert_eq!([number(0.0), number(2.5), number(100.0)], ["0", "2.5", "100"]);
    }
}
