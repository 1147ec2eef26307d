//! The layout string of Megatron Core's `--pipeline-model-parallel-layout`: which layers form which stage.
//!
//! `Et*3|(tt|)*29,m|L` are an embedding and three decoder layers on stage 0, two decoder layers on each of the next 29,
//! a multi-token prediction layer, and the loss. Stages are parted by `|`; `x*n` repeats a letter and `(...)*n` what
//! stands in parentheses (which do not nest); commas are for the eye. With `v` chunks on each of `p` ranks, stage `i`
//! is on rank `i mod p`.

use std::fmt;

use crate::error::{PlanError, Result, shortened};

/// More layers than any model has: a slip of the pen in a repeat count must not fill the memory.
const MAX_LAYERS: usize = 1 << 20;

/// What a layer is, as far as the layout string tells layers apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerKind {
    /// The embedding, `E`: once, in front.
    Embedding,
    /// A transformer layer, `t`.
    Decoder,
    /// A layer of multi-token prediction, `m`: behind all decoder layers.
    Mtp,
    /// The output layer and the loss, `L`: once, at the end.
    Loss,
}

impl LayerKind {
    const ALL: [(Self, char, &'static str); 4] = [
        (Self::Embedding, 'E', "embedding"),
        (Self::Decoder, 't', "decoder"),
        (Self::Mtp, 'm', "mtp"),
        (Self::Loss, 'L', "loss"),
    ];

    /// Its letter in a layout string.
    #[must_use]
    pub const fn letter(self) -> char {
        Self::ALL[self as usize].1
    }

    /// Its name: `embedding`, `decoder`, `mtp` or `loss`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].2
    }

    /// Reads what [`LayerKind::name`] writes.
    ///
    /// # Errors
    /// [`PlanError::BadLayout`] for any other name.
    pub fn parse(name: &str) -> Result<Self> {
        let known = Self::ALL.iter().find(|(.., known)| *known == name);
        known.map(|(kind, ..)| *kind).ok_or_else(|| PlanError::BadLayout {
            reason: format!("unknown layer {:?}: expected embedding, decoder, mtp or loss", shortened(name)),
        })
    }

    fn of_letter(letter: char) -> Option<Self> {
        Self::ALL.iter().find(|(_, known, _)| *known == letter).map(|(kind, ..)| *kind)
    }
}

/// Layers in their order and where they are cut into stages. Valid by construction: an embedding first, a loss last,
/// decoder layers before those of multi-token prediction, and no stage empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerLayout {
    layers: Vec<LayerKind>,
    boundaries: Vec<usize>,
}

impl LayerLayout {
    /// Cuts layers at boundaries, as [`partition`](super::partition) gives them.
    ///
    /// # Errors
    /// [`PlanError::BadLayout`] for layers in an order that Megatron refuses, [`PlanError::BadPartition`] for
    /// boundaries that are none.
    pub fn new(layers: Vec<LayerKind>, boundaries: Vec<usize>) -> Result<Self> {
        check_order(&layers, |layer| format!("layer {layer}"))?;
        let boundaries = super::partition::manual(boundaries, layers.len())?;
        Ok(Self { layers, boundaries })
    }

    /// Reads a layout string.
    ///
    /// # Errors
    /// [`PlanError::BadLayout`] naming the character, counted from 1, at which the string goes wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let mut symbols = Vec::new();
        Reader::new(text).read(&mut symbols)?;
        let mut layers = Vec::new();
        let mut columns = Vec::new();
        let mut boundaries = vec![0];
        let end = Symbol { kind: None, column: text.chars().count() + 1 };
        for symbol in symbols.into_iter().chain([end]) {
            if let Some(kind) = symbol.kind {
                layers.push(kind);
                columns.push(symbol.column);
            } else if boundaries.last() == Some(&layers.len()) {
                let reason =
                    format!("stage {} has no layer; every stage here holds at least one", boundaries.len() - 1);
                return Err(bad(symbol.column, &reason));
            } else {
                boundaries.push(layers.len());
            }
        }
        check_order(&layers, |layer| format!("character {}", columns[layer]))?;
        Ok(Self { layers, boundaries })
    }

    /// All layers in their order.
    #[must_use]
    pub fn layers(&self) -> &[LayerKind] {
        &self.layers
    }

    /// Where the stages begin, and the end of the last one.
    #[must_use]
    pub fn boundaries(&self) -> &[usize] {
        &self.boundaries
    }

    /// The layers of each stage.
    #[must_use]
    pub fn stages(&self) -> impl ExactSizeIterator<Item = &[LayerKind]> {
        self.boundaries.windows(2).map(|pair| &self.layers[pair[0]..pair[1]])
    }
}

/// The layout string, with repeats written short.
impl fmt::Display for LayerLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut stages = self.stages().peekable();
        while let Some(stage) = stages.next() {
            let mut count = 1_usize;
            while stages.next_if_eq(&stage).is_some() {
                count += 1;
            }
            // The last stage holds the only loss, so what is repeated always has a bar behind it.
            match (count, stages.peek().is_some()) {
                (1, false) => f.write_str(&letters(stage))?,
                (1, true) => write!(f, "{}|", letters(stage))?,
                _ => write!(f, "({}|)*{count}", letters(stage))?,
            }
        }
        Ok(())
    }
}

/// The letters of one stage, runs of three and more written as `t*3`.
fn letters(stage: &[LayerKind]) -> String {
    let runs = stage.chunk_by(PartialEq::eq).map(|run| match run.len() {
        count @ 3.. => format!("{}*{count}", run[0].letter()),
        _ => run.iter().map(|kind| kind.letter()).collect(),
    });
    runs.collect()
}

/// Megatron's own rules for the order of layers. `place` names the place of a layer in an error.
fn check_order(layers: &[LayerKind], place: impl Fn(usize) -> String) -> Result<()> {
    let wrong =
        |layer: usize, reason: &str| Err(PlanError::BadLayout { reason: format!("{}: {reason}", place(layer)) });
    let Some((&last, before)) = layers.split_last() else {
        return Err(PlanError::BadLayout { reason: "there is no layer".to_owned() });
    };
    if layers[0] != LayerKind::Embedding {
        return wrong(0, &format!("the first layer must be the embedding (E), not {}", layers[0].name()));
    }
    if last != LayerKind::Loss {
        return wrong(before.len(), &format!("the last layer must be the loss (L), not {}", last.name()));
    }
    let mut seen_mtp = false;
    for (layer, kind) in before.iter().enumerate().skip(1) {
        match kind {
            LayerKind::Embedding => return wrong(layer, "a second embedding (E); there is one, in front"),
            LayerKind::Loss => return wrong(layer, "a loss (L) that is not the last layer"),
            LayerKind::Decoder if seen_mtp => {
                return wrong(layer, "a decoder layer (t) behind one of multi-token prediction (m)");
            }
            LayerKind::Mtp => seen_mtp = true,
            LayerKind::Decoder => {}
        }
    }
    Ok(())
}

fn bad(column: usize, reason: &str) -> PlanError {
    PlanError::BadLayout { reason: format!("character {column}: {reason}") }
}

/// A layer, or a bar between two stages (`kind` is `None`), and where it is written.
#[derive(Clone, Copy)]
struct Symbol {
    kind: Option<LayerKind>,
    column: usize,
}

/// Reads letters, bars, commas, repeats and parentheses.
struct Reader<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    column: usize,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: text.chars().peekable(), column: 0 }
    }

    fn next(&mut self) -> Option<char> {
        self.column += 1;
        self.rest.next()
    }

    fn read(&mut self, symbols: &mut Vec<Symbol>) -> Result<()> {
        let mut open = None;
        // Where the thing begins that a repeat behind it would repeat.
        let mut unit = None;
        while let Some(letter) = self.next() {
            let (column, start) = (self.column, symbols.len());
            match letter {
                ',' => unit = None,
                '(' if open.is_none() => (open, unit) = (Some((start, column)), None),
                '(' => return Err(bad(column, "parentheses do not nest")),
                ')' => match open.take() {
                    Some((first, _)) if first == start => return Err(bad(column, "the parentheses hold nothing")),
                    Some(_) if self.rest.peek() != Some(&'*') => {
                        return Err(bad(column, "a closing parenthesis is followed by *n, the number of repeats"));
                    }
                    Some((first, _)) => unit = Some(first),
                    None => return Err(bad(column, "a closing parenthesis without an opening one")),
                },
                '*' => self.repeat(symbols, unit.take().ok_or_else(|| bad(column, "nothing stands before *"))?)?,
                _ => {
                    symbols.push(Symbol { kind: self.layer_or_bar(letter)?, column });
                    unit = Some(start);
                }
            }
        }
        match open {
            Some((_, column)) => Err(bad(column, "this parenthesis is never closed")),
            None => Ok(()),
        }
    }

    fn layer_or_bar(&self, letter: char) -> Result<Option<LayerKind>> {
        match LayerKind::of_letter(letter) {
            None if letter != '|' => {
                let reason =
                    format!("unexpected {letter:?}: expected E, t, m or L (layers), | (next stage), *n or (...)*n");
                Err(bad(self.column, &reason))
            }
            kind => Ok(kind),
        }
    }

    /// Repeats what stands from `start` on as often as the number behind the `*` says.
    fn repeat(&mut self, symbols: &mut Vec<Symbol>, start: usize) -> Result<()> {
        let column = self.column + 1;
        let mut count: Option<usize> = None;
        while let Some(digit) = self.rest.peek().and_then(|letter| letter.to_digit(10)) {
            self.next();
            count = Some(count.unwrap_or(0).saturating_mul(10).saturating_add(digit as usize));
        }
        let unit = symbols[start..].to_vec();
        match count {
            None => Err(bad(column, "expected the number of repeats behind *")),
            Some(0) => Err(bad(column, "0 repeats: leave the layer out instead")),
            Some(count) if unit.len().saturating_mul(count) > MAX_LAYERS - start => {
                Err(bad(column, &format!("{count} repeats make more than {MAX_LAYERS} layers")))
            }
            Some(count) => {
                (1..count).for_each(|_| symbols.extend_from_slice(&unit));
                Ok(())
            }
        }
    }
}
