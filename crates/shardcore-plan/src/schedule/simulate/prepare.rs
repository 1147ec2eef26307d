//! Costs and links, checked and laid out per stage.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{PlanError, Result};
use crate::schedule::costs::Costs;
use crate::schedule::flow::{Flow, NO_STAGE};

/// So many edges does a message name.
const TOLD: usize = 16;

/// The links between ranks, where they differ from one latency for all.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// Latency of single directed edges (sender, receiver) in place of [`Costs::hop`].
    pub latency: BTreeMap<(u32, u32), f64>,
    /// Size of each stage's output (of a slice, where sequences are cut), and of the gradient that comes back for it;
    /// empty: messages have no size.
    pub message: Vec<f64>,
    /// Size that a directed edge carries in one unit of time; its messages follow one another.
    pub bandwidth: f64,
    /// Whether a rank computes while its messages are under way. If not, a rank that sends or receives waits until the
    /// message has arrived; a receive takes it when it is posted, so a lowered program must run where every message
    /// blocks (unless it is declared for buffers, into which a send needs no partner).
    pub overlap: bool,
    /// What a composite that waits for all its inputs takes, as a part of the sum of its parts: below 1 where the parts
    /// fill each other's gaps.
    pub composite: f64,
}

impl Default for Network {
    fn default() -> Self {
        Self { latency: BTreeMap::new(), message: Vec::new(), bandwidth: f64::INFINITY, overlap: true, composite: 1.0 }
    }
}

/// What a message between two stages takes; the index of its directed edge.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Link {
    pub(super) latency: f64,
    pub(super) transfer: f64,
    pub(super) edge: u32,
    pub(super) crosses: bool,
}

/// Costs and links per stage.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    pub(super) forward: Vec<f64>,
    pub(super) input_grad: Vec<f64>,
    pub(super) weight_grad: Vec<f64>,
    pub(super) backward: Vec<f64>,
    /// From each stage to the next one.
    pub(super) onward: Vec<Link>,
    /// From each stage to the one before.
    pub(super) back: Vec<Link>,
    pub(super) num_edges: usize,
    pub(super) overlap: bool,
    pub(super) composite: f64,
}

impl Prepared {
    pub(super) fn set(&mut self, flow: &Flow, costs: &Costs, network: &Network) -> Result<()> {
        check(flow, costs, network)?;
        check_edges(flow, network)?;
        let fill = |to: &mut Vec<f64>, from: &[f64]| {
            to.clear();
            to.extend_from_slice(from);
        };
        fill(&mut self.forward, &costs.forward);
        fill(&mut self.input_grad, &costs.input_grad);
        fill(&mut self.weight_grad, &costs.weight_grad);
        if let Some(fused) = &costs.fused_backward {
            fill(&mut self.backward, fused);
        } else {
            let parts = costs.input_grad.iter().zip(&costs.weight_grad);
            self.backward.clear();
            self.backward.extend(parts.map(|(input, weight)| input + weight));
        }
        (self.overlap, self.composite) = (network.overlap, network.composite);
        self.set_links(flow, costs, network);
        Ok(())
    }

    fn set_links(&mut self, flow: &Flow, costs: &Costs, network: &Network) {
        let mut edges = BTreeMap::new();
        let mut link = |from: usize, to: u32, producer: usize| {
            if to == NO_STAGE || flow.rank[from] == flow.rank[to as usize] {
                return Link::default();
            }
            let ends = (flow.rank[from], flow.rank[to as usize]);
            let num_edges = u32::try_from(edges.len()).unwrap_or(u32::MAX);
            let message = network.message.get(producer).copied().unwrap_or(0.0);
            Link {
                latency: network.latency.get(&ends).copied().unwrap_or(costs.hop),
                transfer: if message > 0.0 { message / network.bandwidth } else { 0.0 },
                edge: *edges.entry(ends).or_insert(num_edges),
                crosses: true,
            }
        };
        self.onward.clear();
        self.onward.extend((0..flow.num_stages).map(|stage| link(stage, flow.next[stage], stage)));
        self.back.clear();
        self.back.extend((0..flow.num_stages).map(|stage| link(stage, flow.prev[stage], flow.prev[stage] as usize)));
        self.num_edges = edges.len();
    }
}

/// Every list has one entry per stage, and every cost is a finite number of at least 0.
pub(super) fn check(flow: &Flow, costs: &Costs, network: &Network) -> Result<()> {
    let lists = [
        ("forward", &costs.forward),
        ("input_grad", &costs.input_grad),
        ("weight_grad", &costs.weight_grad),
        ("activation", &costs.activation),
        ("stash", &costs.stash),
    ];
    let fused = costs.fused_backward.iter().map(|list| ("fused_backward", list));
    let messages = Some(("message", &network.message)).filter(|(_, list)| !list.is_empty());
    for (name, list) in lists.into_iter().chain(fused).chain(messages) {
        if list.len() != flow.num_stages {
            let what = format!("{name} (a list of {})", list.len());
            return Err(PlanError::BadCost {
                what,
                expected: format!("one entry for each of the {} stages", flow.num_stages),
            });
        }
        if let Some((stage, value)) = list.iter().enumerate().find(|(_, value)| !is_cost(**value)) {
            return Err(bad_number(format!("{name} of stage {stage}"), *value));
        }
    }
    let latencies = network.latency.iter().map(|((from, to), value)| (format!("latency of edge {from}->{to}"), *value));
    let single = [("hop".to_owned(), costs.hop), ("composite".to_owned(), network.composite)];
    if let Some((name, value)) = latencies.chain(single).find(|(_, value)| !is_cost(*value)) {
        return Err(bad_number(name, value));
    }
    if network.bandwidth.is_nan() || network.bandwidth <= 0.0 {
        let what = format!("bandwidth = {}", network.bandwidth);
        return Err(PlanError::BadCost { what, expected: "a number above 0, or infinity".to_owned() });
    }
    Ok(())
}

/// A latency is for an edge over which messages pass.
fn check_edges(flow: &Flow, network: &Network) -> Result<()> {
    if network.latency.is_empty() {
        return Ok(());
    }
    let neighbours = flow.rank.iter().zip(&flow.next).filter(|(_, next)| **next != NO_STAGE);
    let pairs = neighbours.map(|(&rank, &next)| (rank, flow.rank[next as usize])).filter(|(rank, next)| rank != next);
    let edges: BTreeSet<(u32, u32)> = pairs.flat_map(|(rank, next)| [(rank, next), (next, rank)]).collect();
    let Some((from, to)) = network.latency.keys().find(|edge| !edges.contains(*edge)) else { return Ok(()) };
    let known: Vec<String> = edges.iter().take(TOLD).map(|(from, to)| format!("{from}->{to}")).collect();
    let more = if edges.len() > TOLD { ", ..." } else { "" };
    let expected = if known.is_empty() {
        "no edge: all stages are on one rank".to_owned()
    } else {
        format!("an edge over which messages pass: {}{more}", known.join(", "))
    };
    Err(PlanError::BadCost { what: format!("latency of edge {from}->{to}"), expected })
}

fn is_cost(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

fn bad_number(what: impl std::fmt::Display, value: f64) -> PlanError {
    PlanError::BadCost { what: format!("{what} = {value}"), expected: "a finite number of at least 0".to_owned() }
}
